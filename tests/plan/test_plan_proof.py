"""Does the prover refuse every table that is wrong, and no other? An interpreter beside it shares nothing with it."""

import itertools
import json
import random
import time

import numpy as np
import pytest

from hvdlite.plan import Draft, PlanError, Table, make, prove, registry
from hvdlite.plan.proof import MOVED_MAX
from hvdlite.plan.table import COPY, FOLD, HOW, MOVE, REDUCE, SUMS, from_json

STAR = [[(0, 1), (1, 2), (1, 3)], [(0, 2), (2, 3), (3, 1)]]


def every_plan(n):
    for name, (kinds, _, _) in registry.names().items():
        if name not in ("trees", "hierarchical") and not (name == "halving" and n & (n - 1)):
            yield from (make(name, n, kind=kind) for kind in kinds)
    for a in (a for a in range(2, n) if n % a == 0):
        yield make("grid", n, dims=(a, n // a), orders=[(0, 1), (1, 0)])
        hosts = [list(range(h, n, a)) for h in range(a)]
        yield make("hierarchical", n, hosts=hosts)
    if n == 4:
        yield from (make("trees", n, kind=kind, packed=STAR, pieces=2) for kind in ("broadcast", "allreduce"))


def gives(table, rank, chunk):
    """Is this chunk of this rank's buffer an input?"""
    n, c = table.size, table.chunks
    if table.kind in SUMS:
        return True
    return rank == (table.root if table.kind == "broadcast" else chunk * n // c)


def wanted(table, values):
    """(rank, chunk): the value, of all that the kind promises."""
    n, c = table.size, table.chunks
    for rank, chunk in itertools.product(range(n), range(c)):
        if table.kind == "alltoall" and chunk * n * n // c % n != rank:
            continue
        if table.kind == "reducescatter" and chunk * n // c != rank:
            continue
        if table.kind != "reduce" or rank == table.root:
            yield (rank, chunk), sum(values[r][chunk] for r in range(n) if gives(table, r, chunk))


def interpret(table, values):
    """The plain meaning, on whole numbers, a move after the other."""
    state, kept = [list(v) for v in values], {}
    for _, rows in itertools.groupby(table.moves.tolist(), lambda row: row[0]):
        before = [list(s) for s in state]
        for _, src, dst, at, n, how in rows:
            for c in range(at, at + n):
                if how == COPY:
                    state[dst][c] = before[src][c]
                elif how == REDUCE:
                    state[dst][c] += before[src][c]
                elif how == FOLD:
                    state[src][c] += sum(kept.pop((src, c), ()))
                else:
                    kept.setdefault((dst, c), []).append(before[src][c])
    return state


def is_right(table, r):
    values = [[r.randrange(1 << 40) for _ in range(table.chunks)] for _ in range(table.size)]
    state = interpret(table, values)
    return all(state[rank][chunk] == value for (rank, chunk), value in wanted(table, values))


def is_proved(table):
    try:
        return bool(prove(table))
    except PlanError as error:
        assert str(error).startswith(f"plan {table.name!r}: "), error
        return False


def test_tables_of_2_to_32_ranks():
    r, count = random.Random(0), 0
    for n in range(2, 33):
        for table in every_plan(n):  # made is proved
            count += 1
            assert n > 8 or is_right(table, r), table
    assert count > 350


def test_ordered_tables():
    told = {t.name: (prove(t).ordered, prove(t).in_rank_order) for t in every_plan(8) if t.kind == "allreduce"}
    assert told["direct"] == told["central"] == (True, True)
    assert told["halving"] == (True, False) and told["ring"] == (False, False)
    assert all(prove(table).ordered for table in every_plan(1) if table.kind in SUMS)


def mutate(table, r):
    m = table.moves.copy()
    i = r.randrange(len(m))
    what = r.choice(("src", "dst", "lost", "doubled", "chunk", "order", "how"))
    if what in ("src", "dst"):
        m[i][what] = r.choice([x for x in range(table.size) if x not in (m[i]["src"], m[i]["dst"])])
    elif what == "lost":
        m = np.delete(m, i)
    elif what == "doubled":
        m = np.insert(m, i, m[i])
        m[i]["step"] = r.randrange(int(m[i]["step"]), table.steps + 1)
    elif what == "chunk":
        m[i]["at"] = r.randrange(table.chunks - m[i]["n"] + 1)
    elif what == "order":
        j = r.randrange(len(m))
        m[i]["step"], m[j]["step"] = m[j]["step"], m[i]["step"]
    else:
        m[i]["how"] = COPY if m[i]["how"] != COPY else REDUCE
    m = m[np.argsort(m["step"], kind="stable")]
    return Table(table.name, table.kind, table.size, table.chunks, m, table.root)


def test_no_wrong_mutant_passes():
    r, wrong = random.Random(1), 0
    tables = {n: list(every_plan(n)) for n in (3, 4, 5, 6, 8)}
    for _ in range(1000):
        mutant = mutate(r.choice(tables[r.choice(list(tables))]), r)
        right = is_right(mutant, r)
        wrong += not right
        assert right or not is_proved(mutant), mutant.to_json()
    assert wrong > 600


def test_ring_of_64_ranks():
    begin = time.perf_counter()
    made = make("ring", 64)
    print(f"{len(made.moves)} moves made and proved in {time.perf_counter() - begin:.3f} s")
    assert prove(made).moves == 2 * 63 * 64


def drafted(size, steps, kind="allreduce", chunks=1, n=1):
    """Steps as text, "1+0 2+0; 0=1; 1?0; 0!": 1 sends to 0, which adds, copies, or keeps it; 0 folds. Chunk 0, or n."""
    draft = Draft("mine", kind, size, chunks=chunks)
    for step in steps.split(";"):
        for src, sign, *dst in step.split():
            if sign == "!":
                draft.fold(int(src), 0, n)
            else:
                draft.move(int(src), int(dst[0]), 0, n, {"+": "reduce", "=": "copy", "?": "stage"}[sign])
        draft.next()
    return draft.table()


@pytest.mark.parametrize(
    "size, steps, text",
    [
        (3, "", "in the end chunk 0 of rank 0 lacks what rank 1, 2 gave"),
        (2, "1+0; 1+0", "rank 0 counts that of rank 1 more than once; in step 1 rank 0 adds from rank 1 what it has: "),
        (3, "1+0 2+0", "step 0: two moves write chunk 0 of rank 0, in no defined order"),
        (3, "; 1+0 2+1", "step 1: rank 1 sends chunk 0 and writes it, too"),
        (2, "1?0 0!", "step 0: rank 0 folds chunk 0 while a part of it still comes"),
        (2, "1?0; 1?0; 0!", "step 2: rank 0 folds chunk 0 and has kept that of rank 1 twice"),
        (
            3,
            "1?0 2?0 0?1; 0! 2+1; 1!; 0=2",
            "rank 1 adds chunk 0 in another order than rank 0: their bits",
        ),
        (2, "1+0; 0=1;" + "1+0; 0=1;" * 61, "more than once"),  # 2^61 is 1 modulo the prime
    ],
)
def test_what_is_wrong_is_told(size, steps, text):
    with pytest.raises(PlanError) as error:
        prove(drafted(size, steps))
    assert text in str(error.value) and str(error.value).startswith("plan 'mine': ")
    assert str(error.value).endswith(" [HVD001]")


def test_what_stands_where_nothing_is_given_is_no_zero():
    with pytest.raises(PlanError, match="chunk 0 of rank 1 holds what no rank gave"):
        prove(drafted(2, "0+1", kind="broadcast"))


def test_what_would_take_too_long_is_refused():
    with pytest.raises(PlanError, match=r"more than \d+ chunks in total \[HVD002\]"):
        prove(drafted(2, "0=1;" * (MOVED_MAX // (1 << 20) + 1), chunks=1 << 20, n=1 << 20))


def test_many_folds_beside_much_that_is_kept_are_quick():
    draft = Draft("mine", "allreduce", 64)
    for k in range(6300):
        draft.move(1 + k % 63, 0, 0, 64, "stage")
    for k in range(1000):
        draft.next()
        draft.fold(1 + k % 63, 0)
    table, begin = draft.table(), time.process_time()
    with pytest.raises(PlanError, match="in the end chunk 0 of rank 0 lacks"):
        prove(table)
    assert time.process_time() - begin < 2


def test_rows_are_aligned_and_mean_the_same():
    for table in itertools.chain.from_iterable(every_plan(n) for n in (2, 3, 4, 6, 8)):
        n, moves = table.size, []
        folds = [[row[3:5] for row in table.moves.tolist() if row[5] == FOLD and row[1] == r] for r in range(n)]
        rows = [table.rows(r) for r in range(n)]
        assert len({len(each) for each in rows}) == 1
        for i, r in itertools.product(range(len(rows[0])), range(n)):
            row = rows[r][i]
            if row.to >= 0:
                other = rows[row.to][i]
                assert (other.frm, other.recv_at, other.recv_n) == (r, row.send_at, row.send_n), (table.name, i, r)
                moves.append((2 * i, r, row.to, row.send_at, row.send_n, HOW[other.how]))
            if row.fold:
                moves.append((2 * i + 1, r, r, *folds[r].pop(0), HOW[FOLD]))
        numbers = [(*move[:5], HOW.index(move[5])) for move in sorted(moves, key=lambda move: move[0])]
        again = Table(table.name, table.kind, n, table.chunks, np.array(numbers, MOVE), table.root)
        assert prove(again).ordered == prove(table).ordered


def test_open_files(tmp_path):
    path = tmp_path / "mine.json"
    text = make("ring", 4).to_json()
    path.write_text(text)
    assert registry.file(str(path)).digest() == make("ring", 4).digest()
    r, refused = random.Random(2), 0
    for _ in range(2000):
        broken = list(text)
        for _ in range(r.randrange(1, 4)):
            broken[r.randrange(len(broken))] = r.choice('0123456789-,[]{}"abe.')
        try:
            table = from_json("".join(broken))
            assert not is_proved(table) or is_right(table, r)
        except PlanError:
            refused += 1
    assert refused > 1000
    wrong = {**json.loads(text), "moves": []}
    for bad in (b"\xff", b"[" * 100000, json.dumps(wrong).encode()):
        path.write_bytes(bad)
        with pytest.raises(PlanError, match=r"mine\.json: .*\[HVD00[12]\]"):
            registry.file(str(path))
