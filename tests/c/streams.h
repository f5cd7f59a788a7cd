/* streams.h - pairs of connected sockets for crews whose ranks are linked, as Python would hand them to the core.
 *
 * Every purpose (the tensors of a set, its votes) has a pair for every two ranks. Between threads they are made when
 * one of the two asks first; for processes they must be there before the fork, and a child closes what is not its own,
 * or else nobody would ever see the end of a stream.
 */
#ifndef HVD_TEST_STREAMS_H
#define HVD_TEST_STREAMS_H

#include "base/base.h"

#define STREAMS_RANKS    8
#define STREAMS_PURPOSES 600

void streams_open(int size, int purposes); /* purposes that are made now */
void streams_keep(int rank);               /* in a child */
/* row[i]: the stream from `rank` to ranks[i], -1 to itself. They belong to the caller. */
void streams_take(int purpose, int rank, const int *ranks, int count, int *row);
void streams_close(void); /* what nobody has taken */
/* Two ends of a TCP connection by themselves, with buffers of about so many bytes; 0: as the system has them. */
void streams_loopback(int *pair, int buffer);

#endif
