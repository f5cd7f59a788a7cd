/* transcript.h - the protocol as a play: commands, each followed by what must be seen ("> ..." lines).
 *
 *     open SIZE [slots N] [fresh N] [forgives 1]
 *         The first line.
 *     RANKS NAME [SHAPE] [WORD...]
 *         Submit. RANKS is `all` or 0,2; NAME # is unnamed; SHAPE is 64x3; a WORD is a kind, an op, a dtype, `plane`,
 *         or root=1 peer=2 pre=2 post=2 group=9/3 priority=1 nan=1 inf=2;
 *         `gpu` behind the dtype: the tensor lies there.
 *     RANKS !join     RANKS !leave     RANKS !tune 8     RANKS !date 8
 *     vote RANKS
 *         These vote now: what they submit later is not in this round's vote.
 *     round
 *         The others vote, all decide.
 *     settle
 *         Rounds until nobody has news.
 *
 * A round is shown as its number, the planned items with their slots (`without 2`: rank 2 had no request;
 * `refused`: the item fails; `plane`), a mismatch with the ranks whose request fails, who joined last, who
 * left, its date unless that is 1, and `...` when some rank wants another round.
 * A refused submit is shown as `refused CODE`.
 */
#ifndef HVD_TESTS_TRANSCRIPT_H
#define HVD_TESTS_TRANSCRIPT_H

/* Plays it; ends the test with the difference if what is seen is not what is written. */
void transcript_play(const char *title, const char *script);

#endif
