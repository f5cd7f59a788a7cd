/* json_string.c - how does a text become JSON that every reader takes?
 *
 * Names of tensors are bytes of the user's, and may be cut in the middle of a letter. JSON is UTF-8, and a reader may
 * refuse a whole file for one byte that is not. So a letter is what Unicode says: no longer than it need be, no half of
 * a surrogate pair, not above U+10FFFF; and any other byte is replaced.
 */
#include "json_string.h"

#include <string.h>

static int follows(const unsigned char *byte, int count, unsigned char least, unsigned char most)
{
    if (byte[1] < least || byte[1] > most)
        return 0;
    for (int i = 2; i < count; i++)
        if (byte[i] < 0x80 || byte[i] > 0xbf)
            return 0; /* the end of the text is no such byte, either */
    return count;
}

int hvd_json_letter(const char *text)
{
    const unsigned char *byte = (const unsigned char *)text, first = byte[0];
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return follows(byte, 2, 0x80, 0xbf);
    if (first >= 0xe0 && first <= 0xef)
        return follows(byte, 3, first == 0xe0 ? 0xa0 : 0x80, first == 0xed ? 0x9f : 0xbf);
    if (first >= 0xf0 && first <= 0xf4)
        return follows(byte, 4, first == 0xf0 ? 0x90 : 0x80, first == 0xf4 ? 0x8f : 0xbf);
    return 0;
}

int hvd_json_put(char to[HVD_JSON_LETTER], const char **text)
{
    static const char digit[] = "0123456789abcdef";
    unsigned char c = (unsigned char)**text;
    int bytes = hvd_json_letter(*text), put = bytes;
    if (c == '"' || c == '\\') {
        to[0] = '\\';
        to[1] = (char)c;
        put = 2;
    } else if (c < ' ' || c == 0x7f) {
        memcpy(to, "\\u00", 4);
        to[4] = digit[c >> 4];
        to[5] = digit[c & 15];
        put = 6;
    } else if (bytes == 0) {
        memcpy(to, "\\ufffd", 6);
        put = 6;
    } else {
        memcpy(to, *text, (size_t)bytes);
    }
    *text += bytes ? bytes : 1;
    return put;
}

void hvd_json_text(FILE *file, const char *text)
{
    char letter[HVD_JSON_LETTER];
    fputc('"', file);
    while (*text)
        fwrite(letter, 1, (size_t)hvd_json_put(letter, &text), file);
    fputc('"', file);
}
