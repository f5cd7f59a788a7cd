"""Pipeline schedules (GPipe, 1F1B, interleaved): pure functions of stage, stages and micro-batches to lists of actions.

    ("F", k)  forward of micro-batch k    ("B", k)  its backward    ("U", n)  update n, of the gradients since the last

Nothing here knows tensors, ranks or time. So the lists of all stages can be checked, timed and drawn before anything
runs. A stage whose layers are in several chunks (`interleaved`) has chunk c of micro-batch k as number k * chunks + c:
("F", 5) is then the second of two chunks for micro-batch 2. Micro-batches and updates are counted from 0, through all
mini-batches of a list. In each chunk backwards come in the order 0, 1, 2, ...: so every schedule of this file adds
gradients as one process that accumulates, and agrees with it bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, Union

Action = tuple[str, int]
Plan = Callable[[int, int, int, int], "list[Action]"]
Costs = Union[float, Sequence[float]]


class Timeline(NamedTuple):
    """When each action runs if it starts as early as it can, and a message takes no time."""

    makespan: float
    stash: list[int]  # by stage: how many micro-batches are between their forward and their backward, at most
    busy: float  # share of all stages' time that is forward or backward
    spans: list[list[tuple[str, int, float, float]]]  # by stage: (what, k, start, end)


def gpipe(stage: int, stages: int, micro_batches: int, batches: int = 1) -> list[Action]:
    """All forwards, all backwards, the update (GPipe). Every stage keeps the activations of all micro-batches."""
    actions: list[Action] = []
    for n in range(batches):
        mine = range(n * micro_batches, (n + 1) * micro_batches)
        actions += [("F", k) for k in mine] + [("B", k) for k in mine] + [("U", n)]
    return actions


def one_f_one_b(stage: int, stages: int, micro_batches: int, batches: int = 1) -> list[Action]:
    """A forward and a backward by turns, empty before each update (DAPPLE, PipeDream-Flush). Stash: stages - stage."""
    actions: list[Action] = []
    for n in range(batches):
        actions += _by_turns(range(n * micro_batches, (n + 1) * micro_batches), stages - stage, micro_batches)
    return actions


def continuous(stage: int, stages: int, micro_batches: int, batches: int = 1) -> list[Action]:
    """1F1B over all mini-batches, never empty in between (PipeDream, 2BW, PipeMare). Stash: stages - stage."""
    return _by_turns(range(micro_batches * batches), stages - stage, micro_batches)


def _by_turns(mine: range, ahead: int, micro_batches: int) -> list[Action]:
    """Backwards run `ahead` micro-batches behind the forwards; an update follows the last of a mini-batch."""
    actions: list[Action] = []
    ahead = min(ahead, len(mine))
    for at in range(len(mine) + ahead):
        if at >= ahead:
            k = mine[at - ahead]
            actions += [("B", k)] if (k + 1) % micro_batches else [("B", k), ("U", k // micro_batches)]
        if at < len(mine):
            actions.append(("F", mine[at]))
    return actions


def interleaved(stage: int, stages: int, micro_batches: int, batches: int = 1, chunks: int = 2) -> list[Action]:
    """1F1B of stages with several chunks; stage 0 has the chunks 0, stages, 2 * stages, ... of the model. The idle time
    is shorter by the number of chunks (Narayanan et al., SC'21, arXiv 2104.04473, section 2.2). As many micro-batches
    as there are stages pass through a chunk before the next one: so their number is a multiple of that.
    """
    rounds = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forwards = [k * chunks + c for ks in rounds for c in range(chunks) for k in ks]
    backwards = [k * chunks + c for ks in rounds for c in reversed(range(chunks)) for k in ks]
    ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forwards))
    actions: list[Action] = []
    for n in range(batches):
        mine = [("F", unit) for unit in forwards[:ahead]]
        for back, unit in enumerate(forwards[ahead:]):
            mine += [("F", unit), ("B", backwards[back])]
        mine += [("B", unit) for unit in backwards[len(forwards) - ahead :]]
        actions += [*shifted(mine, n, micro_batches * chunks), ("U", n)]
    return actions


PLANS: dict[str, Plan] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "continuous": continuous, "interleaved": interleaved
}  # fmt: skip


def shifted(actions: Iterable[Action], batches: int, micro_batches: int) -> list[Action]:
    """The same so many mini-batches later. micro_batches: in a mini-batch, times chunks."""
    return [(what, i + batches * (1 if what == "U" else micro_batches)) for what, i in actions]


def part(stage: int, stages: int, micro_batches: int, nth: int) -> list[Action]:
    """What `continuous` does for mini-batch nth (from 0) since the pipeline was empty: after the last forward of the
    one before, up to its own last forward. Whatever follows, it is the same."""
    steady = min(nth, 2 * stages)  # from there on all parts are alike
    whole = continuous(stage, stages, micro_batches, steady + 1 + stages)
    last = steady * micro_batches - 1
    start = whole.index(("F", last)) + 1 if steady else 0
    return shifted(whole[start : whole.index(("F", last + micro_batches)) + 1], nth - steady, micro_batches)


def rest(stage: int, stages: int, micro_batches: int, batches: int) -> list[Action]:
    """What is left of `continuous` when it ends after so many mini-batches: backwards and updates."""
    steady = min(batches, 2 * stages)
    whole = continuous(stage, stages, micro_batches, steady)
    last = whole.index(("F", steady * micro_batches - 1)) if steady else -1
    return shifted(whole[last + 1 :], batches - steady, micro_batches)


def check(
    lists: Sequence[Sequence[Action]], forward: Costs = 1, backward: Costs = 2, micro_batches: int | None = None,
    together: bool = False, chunks: int = 1
) -> Timeline:  # fmt: skip
    """Runs the lists of all stages on paper. A cost is a number, or a sequence of one number for each stage: of all its
    chunks.

    With `micro_batches`, the number of them in a mini-batch, updates are checked, too: each comes when the backwards up
    to the end of its mini-batch are done, and no later one. `together`: all stages make an update at one time, as a
    norm of all gradients needs it. ValueError if a list is not complete, or if the stages come to wait for each other.
    """
    _complete(lists, micro_batches and micro_batches * chunks)
    costs = {"U": [0.0] * len(lists)}
    for what, cost in (("F", forward), ("B", backward)):
        costs[what] = [each / chunks for each in (cost if isinstance(cost, Sequence) else [cost] * len(lists))]
    last = len(lists) - 1
    ended: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[str, int, float, float]]] = [[] for _ in lists]
    before = -1
    while len(ended) > before:
        before = len(ended)
        for stage, actions in enumerate(lists):
            for what, k in actions[len(spans[stage]) :]:
                needs = [("F", k, stage)] if what == "B" else []
                if what == "F" and (stage or k % chunks):
                    needs += [("F", k, stage - 1) if stage else ("F", k - 1, last)]
                elif what == "B" and (stage < last or (k + 1) % chunks):
                    needs += [("B", k, stage + 1) if stage < last else ("B", k + 1, 0)]
                if together and what == "U":
                    needs += [(*row[row.index((what, k)) - 1], other) for other, row in enumerate(lists)]
                if any(need not in ended for need in needs):
                    break
                start = max([ended[need] for need in needs] + [span[3] for span in spans[stage][-1:]], default=0)
                ended[what, k, stage] = start + costs[what][stage]
                spans[stage].append((what, k, start, ended[what, k, stage]))
    stuck = [(stage, len(done)) for stage, done in enumerate(spans) if len(done) < len(lists[stage])]
    if stuck:
        waits = "; ".join(f"stage {stage} waits at its action {at}, {lists[stage][at]}" for stage, at in stuck)
        raise ValueError(f"the schedules of the stages do not match: {waits} [HVD012]")
    makespan = max(ended.values(), default=0)
    worked = sum(end - start for row in spans for *_, start, end in row)
    stash = [max(accumulate(({"F": 1, "B": -1}.get(a[0], 0) for a in row), initial=0)) for row in lists]
    return Timeline(makespan, stash, worked / (len(lists) * makespan or 1), spans)


def _complete(lists: Sequence[Sequence[Action]], micro_batches: int | None) -> None:
    """Each stage has each action once, as far as the highest number that any stage has, and updates in their place."""
    for stage, actions in enumerate(lists):
        for at, action in enumerate(actions):
            what, k = action if isinstance(action, tuple) and len(action) == 2 else ("", 0)
            if what not in ("F", "B", "U") or not isinstance(k, int) or k < 0:
                found = f"stage {stage} has {action!r} as its action {at}"
                raise ValueError(f"{found}: an action must be ('F', k), ('B', k) or ('U', n) [HVD012]")
    count = max((k + 1 for actions in lists for what, k in actions if what != "U"), default=0)
    updates = {action for actions in lists for action in actions if action[0] == "U"}
    if micro_batches:
        updates = {("U", n) for n in range(-(-count // micro_batches))}
        count = len(updates) * micro_batches
    expected = {(what, k) for what in "FB" for k in range(count)} | updates
    for stage, actions in enumerate(lists):
        times = Counter(actions)
        twice = {action for action in times if times[action] > 1}
        for how, wrong in ("leaves out", expected - set(times)), ("repeats", twice), ("adds", set(times) - expected):
            if wrong:
                named = ", ".join(map(str, sorted(wrong, key=lambda action: action[::-1])[:4]))
                raise ValueError(f"the list of stage {stage} {how} {named} [HVD012]")
        done: set[int] = set()
        for at, (what, k) in enumerate(actions):
            if what == "B":
                done.add(k)
            elif what == "U" and micro_batches and done != set(range((k + 1) * micro_batches)):
                found = f"stage {stage} has ('U', {k}) as its action {at}: it comes after the backwards of 0"
                raise ValueError(f"{found} to {(k + 1) * micro_batches - 1}, and after no other [HVD012]")


def delay(actions: Iterable[Action]) -> Fraction:
    """How many updates come between a micro-batch's forward and its backward: 0 if the pipeline empties first.

    It is the mean over the last mini-batch: a list of at least as many mini-batches as stages is steady there.
    """
    updates, seen, gaps = 0, {}, []
    for what, k in actions:
        if what == "U":
            updates += 1
        elif what == "F":
            seen[k] = updates
        else:
            gaps.append(updates - seen[k])
    last = gaps[len(gaps) - len(gaps) // max(updates, 1) :] or [0]
    return Fraction(sum(last), len(last))


def copies(actions: Sequence[Action], sees: Callable[[int, int], int]) -> int:
    """How many versions of its weights a stage keeps at most; sees(k, done): which one F(k) sees after `done` updates.

    It keeps the newest, those that a micro-batch in flight has seen, and those that a later forward will see.
    """
    done, saw, last_use = 0, {}, {}
    for at, (what, k) in enumerate(actions):
        if what == "F":
            saw[k] = sees(k, done)
        if what == "U":
            done += 1
        else:
            last_use[saw[k]] = at
    updates = [at for at, (what, _) in enumerate(actions) if what == "U"]
    alive = [1 + sum(v < n and use > at for v, use in last_use.items()) for n, at in enumerate(updates, 1)]
    return max(alive, default=1)
