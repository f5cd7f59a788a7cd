"""Rewriting of programs of collectives by small rules; the cheapest is taken.

Each rule looks at one line and what made its input, and gives the lines to put in their place. Every application is
proved (program.same) before it counts, so a rule that is wrong is refused and not run. The search takes the cheapest
program first, as Unity (Unger et al., OSDI 2022) and TASO (Jia et al., SOSP 2019) do; of Unity this is the part that
communicates.

    1  ar = rs, ag                                   7  an ar sinks below a linear operation
    2  rs, ag = ar                                   8  ar + ar = ar of the sum
    3  ar over a+b = ar over a, ar over b; and back  9  own share of ar = rs
    4  ar over a+b = rs a, ar b, ag a                10 own share of ag = itself
    5  ar, ar = ar, scale                            11 two ar = one of both
    6  ag, rs = scale
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from .program import ELEMENTS_MAX, LINES_MAX, Price, Program, ProgramLine, Where, price, same

Rewrite = tuple[
    str, set[int], list[ProgramLine]
]  # the rule, the lines that go, those that come in place of the last of them


class Improved(NamedTuple):
    """rules: the way to the program. proved, refused: rewrites."""

    program: Program
    price: Price
    rules: tuple[str, ...]
    proved: int
    refused: int


class _Site:
    """A program, and what rules ask of it."""

    def __init__(self, program: Program, fresh: Callable[[], str]) -> None:
        self.program, self.fresh = program, fresh
        self.made = {line.out: i for i, line in enumerate(program.lines)}

    def length(self, group: str | None) -> int:
        return len(self.program.parts[group][0]) if group else 0

    def alone(self, name: str, *readers: int) -> tuple[int, ProgramLine] | None:
        """The line that makes it, with its place, if no other line but the readers needs it."""
        at = self.made.get(name)
        if at is None or name in self.program.outputs:
            return None
        used = any(name in line.inputs for i, line in enumerate(self.program.lines) if i not in readers)
        return None if used else (at, self.program.lines[at])


def rewrites(program: Program, fresh: Callable[[], str]) -> Iterator[tuple[str, Program]]:
    """(rule, program) for each place where a rule fits; not proved. fresh: gives new names of vectors."""
    site = _Site(program, fresh)
    for i, line in enumerate(program.lines):
        for rules in (_apart, _pair, _add, _together):
            for rule, removed, lines in rules(site, i, line):
                before = [each for at, each in enumerate(program.lines[:i]) if at not in removed]
                after = [each for at, each in enumerate(program.lines) if at >= i and at not in removed]
                if len(before) + len(lines) + len(after) <= LINES_MAX:
                    yield rule, replace(program, lines=(*before, *lines, *after))


def _apart(site: _Site, i: int, line: ProgramLine) -> Iterator[Rewrite]:
    """An allreduce in parts."""
    _, out, inputs, group, _ = line
    if line.op != "ar" or group is None:
        return
    n = site.program.lengths[inputs[0]]
    if n % site.length(group) == 0:
        t = site.fresh()
        yield "1 ar = rs, ag", {i}, [ProgramLine("rs", t, inputs, group), ProgramLine("ag", out, (t,), group)]
    if "+" in group:
        first, rest = group.split("+", 1)
        for a, b in ((first, rest), (rest, first)):
            t, u = site.fresh(), site.fresh()
            yield (
                "3 ar over a+b = ar over a, ar over b",
                {i},
                [ProgramLine("ar", t, inputs, a), ProgramLine("ar", out, (t,), b)],
            )
            if n % site.length(a) == 0:
                lines = [
                    ProgramLine("rs", t, inputs, a),
                    ProgramLine("ar", u, (t,), b),
                    ProgramLine("ag", out, (u,), a),
                ]
                yield "4 ar over a+b = rs a, ar b, ag a", {i}, lines


def _pair(site: _Site, i: int, line: ProgramLine) -> Iterator[Rewrite]:
    """A line and the one that makes its only input."""
    op, out, inputs, group, more = line
    found = site.alone(inputs[0], i)
    if found is None or len(inputs) > 1:
        return
    j, before = found
    k, both = site.length(before.group), {i, j}
    here = before.group == group
    pair = (before.op, op)
    if pair == ("rs", "ag") and here:
        yield "2 rs, ag = ar", both, [ProgramLine("ar", out, before.inputs, group)]
    if pair == ("ar", "ar") and here:
        lines = [ProgramLine("ar", before.out, before.inputs, group), ProgramLine("scale", out, (before.out,), None, k)]
        yield "5 ar, ar = ar, scale", both, lines
    if pair == ("ar", "ar") and not here:
        for joined in (f"{before.group}+{group}", f"{group}+{before.group}"):
            if joined in site.program.parts:
                yield "3 back", both, [ProgramLine("ar", out, before.inputs, joined)]
    if pair == ("ag", "rs") and here:
        yield "6 ag, rs = scale", both, [ProgramLine("scale", out, before.inputs, None, k)]
    if before.op == "ar" and op in ("linear", "scale"):
        t = site.fresh()
        lines = [ProgramLine(op, t, before.inputs, None, more), ProgramLine("ar", out, (t,), before.group)]
        yield "7 ar sinks below a linear operation", both, lines
    if pair == ("ar", "own") and here:
        yield "9 own share of ar = rs", both, [ProgramLine("rs", out, before.inputs, group)]
    if pair == ("ag", "own") and here:
        yield "10 own share of ag = itself", both, [ProgramLine("scale", out, before.inputs, None, 1)]


def _add(site: _Site, i: int, line: ProgramLine) -> Iterator[Rewrite]:
    if line.op != "add" or line.inputs[0] == line.inputs[1]:
        return
    a, b = (site.alone(name, i) for name in line.inputs)
    if a and b and a[1].op == b[1].op == "ar" and a[1].group == b[1].group:
        t = site.fresh()
        lines = [ProgramLine("add", t, (a[1].inputs[0], b[1].inputs[0])), ProgramLine("ar", line.out, (t,), a[1].group)]
        yield "8 ar + ar = ar of the sum", {i, a[0], b[0]}, lines


def _together(site: _Site, i: int, line: ProgramLine) -> Iterator[Rewrite]:
    """The next allreduce of the same group whose input is there already."""
    if line.op != "ar":
        return
    inputs, lengths = site.program.inputs, site.program.lengths
    for m in range(i + 1, len(site.program.lines)):
        other = site.program.lines[m]
        name = other.inputs[0]
        n = lengths[line.inputs[0]]
        there = name in inputs or site.made[name] < i
        if (other.op, other.group) == ("ar", line.group) and there and n + lengths[name] <= ELEMENTS_MAX:
            t, u = site.fresh(), site.fresh()
            yield (
                "11 two ar = one of both",
                {i, m},
                [
                    ProgramLine("cat", t, (line.inputs[0], name)),
                    ProgramLine("ar", u, (t,), line.group),
                    ProgramLine("cut", line.out, (u,), None, (0, n)),
                    ProgramLine("cut", other.out, (u,), None, (n, n + lengths[name])),
                ],
            )
            return


def improve(program: Program, where: Where, budget: int = 300) -> Improved:
    """The cheapest program that so many rewrites find."""
    number = itertools.count()

    def fresh() -> str:
        return next(name for name in map("_{}".format, number) if name not in program.lengths)

    seen, tie = {_shape(program)}, itertools.count()
    best: tuple[Price, int, Program, tuple[str, ...]] = (price(program, where), next(tie), program, ())
    heap = [best]
    proved = refused = 0
    while heap and budget > 0:
        now, _, current, steps = heapq.heappop(heap)
        if now.ns > 1.5 * best[0].ns:
            continue
        for rule, other in rewrites(current, fresh):
            if budget <= 0:
                break
            budget -= 1
            shape = _shape(other)
            if shape in seen:
                continue
            seen.add(shape)
            if not same(program, other, len(seen)):
                refused += 1
                continue
            proved += 1
            entry = (price(other, where), next(tie), other, (*steps, rule))
            heapq.heappush(heap, entry)
            best = min(best, entry)
    return Improved(best[2], best[0], best[3], proved, refused)


def _shape(program: Program) -> str:
    """The program with names of its own numbered anew: the same one, found twice, is known by it."""
    names: dict[str, str] = {}

    def short(name: str) -> str:
        return names.setdefault(name, f"_{len(names)}") if name.startswith("_") else name

    return str([(op, short(out), tuple(map(short, inputs)), *rest) for op, out, inputs, *rest in program.lines])
