/* twotree.c - two binary trees, each for one half of the buffer, pipelined: the ring's bytes, a tree's latency.
 *
 * Question: how do many ranks combine a large buffer when the 2(n-1) steps of a ring are too many? In a pipelined
 * binary tree the inner ranks work and the leaves have half of their links idle. So there are two trees, in which a
 * rank that is inner in one is a leaf in the other (but for rank 0, when n is odd), and each carries one half.
 *
 * The first tree: rank i, whose lowest set bit is b, hangs below (i - b) with the next bit set, or where there is no
 * such rank below i - b; 0 is the root. The second is the same over the ranks in reverse, or for odd n moved by one.
 *
 * WHO SENDS WHEN. A rank sends to at most two parents and receives from at most two children, over both trees. Edges
 * get one of two colours so that no two that leave a rank, and no two that arrive at one, have the same. (They form
 * paths and rings of even length, so that alternating works. The colour of an edge is the parity of its distance to the
 * edge with the smallest number in its path or ring, which every rank finds for itself.) Segment s leaves a rank of
 * depth d in step 2(s + D - d) + colour, D being the greatest depth: children always send one or two steps before their
 * parent. So there is at most one send and one receive per step. The second phase is the first one backwards: complete
 * segments go down where partial ones came up.
 *
 * Cost for S bytes in segments of g: about 4(S/2g + D) steps of g; 2S per rank at most and D = O(log n).
 *
 * Source: P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
 * Parallel Computing 35, 2009.
 */
#include "algo.h"

enum { TREES = 2 };
/* What steps() finds out about this rank: of each tree its parent, the colour of the edge to it, its depth; and its
 * children, with tree and colour. */
enum { PARENT, COLOUR = 2, DEPTH = 4, CHILD = 6, CHILD_TREE = 8, CHILD_COLOUR = 10, CHILDREN = 12, DEEPEST };

static int parent_in_first(int size, int i)
{
    if (i == 0)
        return -1;
    int bit = i & -i, above = (i ^ bit) | bit << 1;
    return above < size ? above : i ^ bit;
}

/* From the rank's place in tree t to the rank, and back. */
static int turned(int size, int tree, int i, int by)
{
    return tree == 0 ? i : size % 2 == 0 ? size - 1 - i : (i + by + size) % size;
}

static int parent_of(int size, int tree, int rank)
{
    int above = parent_in_first(size, turned(size, tree, rank, -1));
    return above < 0 ? -1 : turned(size, tree, above, 1);
}

static int depth_of(int size, int tree, int rank)
{
    int depth = 0;
    while ((rank = parent_of(size, tree, rank)) >= 0)
        depth++;
    return depth;
}

/* An edge is child * TREES + tree. Another one that arrives at the same parent, -1 if there is none. */
static int beside(int size, int edge)
{
    int parent = parent_of(size, edge % TREES, edge / TREES);
    for (int other = 0; other < size * TREES; other++)
        if (other != edge && parent_of(size, other % TREES, other / TREES) == parent)
            return other;
    return -1;
}

/* The other edge that leaves the same child, -1 if there is none. */
static int across(int size, int edge)
{
    int other = edge ^ 1;
    return parent_of(size, other % TREES, other / TREES) < 0 ? -1 : other;
}

/* Walk from `edge` to the end of its path, or once around; note the smallest edge and how far away it was. */
static void walk(int size, int edge, bool over_child, int *smallest, int *distance)
{
    int at = edge;
    for (int far = 1;; far++, over_child = !over_child) {
        at = over_child ? across(size, at) : beside(size, at);
        if (at < 0 || at == edge)
            return;
        if (at < *smallest) {
            *smallest = at;
            *distance = far;
        }
    }
}

static int colour_of(int size, int tree, int child)
{
    int edge = child * TREES + tree, smallest = edge, distance = 0;
    walk(size, edge, true, &smallest, &distance);
    walk(size, edge, false, &smallest, &distance);
    return distance % 2;
}

static bool can(int kind, int size)
{
    return kind == HVD_ALLREDUCE && size > 1;
}

static uint64_t half(const struct hvd_shape *shape, int tree)
{
    uint64_t first = shape->count / 2;
    return tree == 0 ? first : shape->count - first;
}

static int segments(const struct hvd_shape *shape)
{
    return (int)((half(shape, 1) + shape->grain - 1) / shape->grain);
}

static int phase(const struct hvd_shape *shape)
{
    int count = segments(shape);
    return count ? 2 * (count + (int)shape->room[DEEPEST] - 1) : 0;
}

static int steps(struct hvd_shape *shape)
{
    int64_t *room = shape->room;
    room[CHILDREN] = room[DEEPEST] = 0;
    for (int tree = 0; tree < TREES; tree++) {
        room[PARENT + tree] = parent_of(shape->size, tree, shape->rank);
        room[DEPTH + tree] = depth_of(shape->size, tree, shape->rank);
        room[COLOUR + tree] = room[PARENT + tree] < 0 ? 0 : colour_of(shape->size, tree, shape->rank);
        for (int rank = 0; rank < shape->size; rank++) {
            int depth = depth_of(shape->size, tree, rank);
            room[DEEPEST] = depth > room[DEEPEST] ? depth : room[DEEPEST];
            if (parent_of(shape->size, tree, rank) != shape->rank)
                continue;
            int64_t k = room[CHILDREN]++;
            HVD_ASSERT(k < 2);
            room[CHILD + k] = rank;
            room[CHILD_TREE + k] = tree;
            room[CHILD_COLOUR + k] = colour_of(shape->size, tree, rank);
        }
    }
    return 2 * phase(shape);
}

/* The range of the segment that crosses, in turn `turn`, an edge of this tree, colour and depth of its child. */
static bool crosses(const struct hvd_shape *shape, int tree, int64_t colour, int64_t depth, int turn, uint64_t *at,
                    uint64_t *count)
{
    int64_t segment = turn / 2 - (shape->room[DEEPEST] - depth);
    if (turn % 2 != colour || segment < 0 || (uint64_t)segment * shape->grain >= half(shape, tree))
        return false;
    uint64_t begin = (uint64_t)segment * shape->grain, left = half(shape, tree) - begin;
    *at = begin + (tree ? half(shape, 0) : 0);
    *count = left < shape->grain ? left : shape->grain;
    return true;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    const int64_t *room = shape->room;
    bool down = i >= phase(shape);
    int turn = down ? 2 * phase(shape) - 1 - i : i;
    step->how = down ? HVD_STEP_COPY : HVD_STEP_REDUCE;
    for (int tree = 0; tree < TREES; tree++) {
        uint64_t at, count;
        if (room[PARENT + tree] < 0 ||
            !crosses(shape, tree, room[COLOUR + tree], room[DEPTH + tree], turn, &at, &count))
            continue;
        *(down ? &step->from : &step->to) = (int)room[PARENT + tree];
        *(down ? &step->recv_at : &step->send_at) = at;
        *(down ? &step->recv_count : &step->send_count) = count;
    }
    for (int64_t k = 0; k < room[CHILDREN]; k++) {
        int tree = (int)room[CHILD_TREE + k];
        uint64_t at, count;
        if (!crosses(shape, tree, room[CHILD_COLOUR + k], room[DEPTH + tree] + 1, turn, &at, &count))
            continue;
        *(down ? &step->to : &step->from) = (int)room[CHILD + k];
        *(down ? &step->send_at : &step->recv_at) = at;
        *(down ? &step->send_count : &step->recv_count) = count;
    }
}

const struct hvd_algo hvd_algo_twotree = {"twotree", false, can, steps, step, false, 0};
