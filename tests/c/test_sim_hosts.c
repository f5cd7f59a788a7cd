/* test_sim_hosts.c - many hosts agree over the tree (sim_hosts.h): how much crosses, in how many rounds.
 *
 * What is learned costs every edge two votes of the same size, however many ranks there are; what is new costs as many
 * bytes of every host, in one round; a mismatch is told to all within three. Sizes are worked out here from
 * negotiation.h.
 */
#include "check.h"
#include "negotiation/negotiation.h"
#include "engine/host_votes/vote_tree.h"
#include "sim_hosts.h"

#define TENSORS 20

static const size_t head = sizeof(struct hvd_frame) + sizeof(struct hvd_vote);

static void one_round(const struct sim_hosts *sim, struct sim_step step, size_t vote_bytes, const char *what)
{
    uint64_t edges = (uint64_t)sim_hosts_count(sim) - 1;
    uint64_t opened = step.messages - 2 * edges; /* frames that only say that a round is open */
    CHECK(step.rounds == 1 && !step.failed, "%s: %llu rounds", what, (unsigned long long)step.rounds);
    CHECK(opened <= 2 * edges && step.bytes == 2 * edges * vote_bytes + opened * sizeof(struct hvd_frame),
          "%s: %llu messages, %llu bytes", what, (unsigned long long)step.messages, (unsigned long long)step.bytes);
    CHECK(step.most_bytes <= HVD_NEAR_MAX * 2 * (vote_bytes + sizeof(struct hvd_frame)), "%s: %llu at one host", what,
          (unsigned long long)step.most_bytes);
}

static void play(int ranks, int per_host)
{
    struct sim_hosts *sim = sim_hosts_open(ranks, per_host, TENSORS, 1);
    struct sim_step step = sim_hosts_step(sim, 0, false);
    one_round(sim, step, head + TENSORS * sizeof(struct hvd_fresh), "first");
    one_round(sim, sim_hosts_step(sim, 0, false), head + 16, "second"); /* two words of bits */
    uint64_t learned = 0;
    for (int i = 0; i < 3; i++)
        learned += sim_hosts_step(sim, 0, false).learned;
    CHECK(learned == 1, "%llu lists were learned", (unsigned long long)learned);
    step = sim_hosts_step(sim, 0, false);
    one_round(sim, step, head, "learned");
    uint64_t one_way_ns = 25000 + head;
    CHECK(step.after_ns == (uint64_t)sim_hosts_deepest(sim) * one_way_ns, "%llu ns over %d edges",
          (unsigned long long)step.after_ns, sim_hosts_deepest(sim));
    step = sim_hosts_step(sim, 0, true);
    CHECK(step.failed && step.rounds <= 3, "a mismatch: %llu rounds", (unsigned long long)step.rounds);
    step = sim_hosts_step(sim, 2000000, false);
    CHECK(!step.failed && step.rounds > 2, "over 2 ms: %llu rounds", (unsigned long long)step.rounds);
    sim_hosts_close(sim);
}

int main(void)
{
    static const int sizes[][2] = {{2, 1}, {3, 1}, {8, 4}, {21, 3}, {64, 8}, {256, 8}, {130, 1}};
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
        play(sizes[i][0], sizes[i][1]);
    return 0;
}
