/* json_string.h - a text as JSON has it, whatever its bytes are.
 *
 * Of what this library writes for others to read, names of tensors are the one part that it has not made itself:
 * they are any bytes, and where a name was cut, a letter may have been, too.
 * One strange name should not cost a reader the whole record.
 */
#ifndef HVD_TRACE_JSON_STRING_H
#define HVD_TRACE_JSON_STRING_H

#include <stdio.h>

/* How many bytes the letter at the beginning of `text` has; 0: what stands there is none, or a part of one. */
int hvd_json_letter(const char *text);
/* The letter at the beginning of `text`, which goes on to the next, as it stands in JSON; how many bytes that are. */
#define HVD_JSON_LETTER 6
int hvd_json_put(char to[HVD_JSON_LETTER], const char **text);
/* In quotes, valid UTF-8: each byte that belongs to no letter becomes U+FFFD. */
void hvd_json_text(FILE *file, const char *text);

#endif
