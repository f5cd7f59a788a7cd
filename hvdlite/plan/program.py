"""Program of the collectives of a step, as data: it can be evaluated, priced and compared.

Lines work on named vectors, of which every rank has one of its own; a name is given once. A group is an axis of the
grid of ranks (row-major), or several joined by +: the collective is over each line of them.

    ["ar", out, [a], group]   allreduce, a sum      ["add", out, [a, b], null]
    ["rs", out, [a], group]   reducescatter         ["cat", out, [a, b], null]       one behind the other
    ["ag", out, [a], group]   allgather             ["cut", out, [a], null, [from, to]]
    ["own", out, [a], group]  this rank's share     ["scale", out, [a], null, factor]
                                                    ["linear", out, [a], null, [rows, which]]  one matrix everywhere

The format is `hvdlite-program-1`: {"format", "axes": [[name, length], ...], "inputs": {name: elements}, "lines",
"outputs": [name, ...]}. Vectors are short; in a price an element stands for many bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .table import SIZE_MAX, PlanError, named, plain

FORMAT = "hvdlite-program-1"
COLLECTIVES = ("ar", "rs", "ag", "own")
INPUTS_OF = {"add": 2, "cat": 2, "scale": 1, "linear": 1, "cut": 1, **dict.fromkeys(COLLECTIVES, 1)}
LINES_MAX, ELEMENTS_MAX, CELLS_MAX = 1000, 1024, 1 << 24
WORK_MAX = 1 << 22  # products and sums of an evaluation, of which a search makes hundreds
PRIME = (1 << 31) - 1
Vectors = dict[str, list[NDArray[np.int64]]]


class ProgramLine(NamedTuple):
    op: str
    out: str
    inputs: tuple[str, ...]
    group: str | None = None
    more: Any = None


@dataclass(frozen=True)
class Program:
    """parts: of each group the lists of ranks. lengths: of each vector. PlanError names the line that is wrong."""

    axes: tuple[tuple[str, int], ...]
    inputs: dict[str, int]
    lines: tuple[ProgramLine, ...]
    outputs: tuple[str, ...]
    parts: dict[str, list[list[int]]] = field(init=False, compare=False, repr=False)
    lengths: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        at = "axes and inputs"
        try:
            size = math.prod(length for _, length in self.axes)
            if not self.axes or min(length for _, length in self.axes) < 1 or size > SIZE_MAX or len(self.axes) > 4:
                raise ValueError(f"one to four axes make 1 to {SIZE_MAX} ranks")
            object.__setattr__(self, "parts", groups(self.axes))
            known: dict[str, int] = {}
            for name, length in self.inputs.items():
                _note(known, name, length)
            if len(self.lines) > LINES_MAX:
                raise ValueError(f"more than {LINES_MAX} lines")
            for number, line in enumerate(self.lines, 1):
                at = f"line {number} ({line.op} {line.out})"
                _note(known, line.out, self._length(line, known))
            at = "outputs"
            absent = [name for name in self.outputs if name not in known]
            if absent or not self.outputs:
                raise ValueError(f"there is no vector {absent[0]!r}" if absent else "there is none")
        except (ValueError, TypeError) as error:
            raise PlanError(f"{plain(at, 80)}: {plain(error, 120)} [HVD006]") from None
        object.__setattr__(self, "lengths", known)

    @property
    def size(self) -> int:
        return math.prod(length for _, length in self.axes)

    def _length(self, line: ProgramLine, known: dict[str, int]) -> int:
        """Of what a line makes. Raises ValueError."""
        op, _, inputs, group, more = line
        if op not in INPUTS_OF or len(inputs) != INPUTS_OF[op]:
            raise ValueError(f"{op!r} on {len(inputs)} vectors: there is none such among {', '.join(INPUTS_OF)}")
        for name in inputs:
            if name not in known:
                raise ValueError(f"there is no vector {name!r} yet")
        n = known[inputs[0]]
        if (group is not None and op not in COLLECTIVES) or (more is not None and op not in ("cut", "scale", "linear")):
            raise ValueError(f"{op!r} has a group or one thing more, which it cannot use")
        if op in COLLECTIVES:
            if group not in self.parts:
                raise ValueError(f"there is no group {group!r}; there are {', '.join(self.parts)}")
            k = len(self.parts[group][0])
            if op in ("rs", "own") and n % k:
                raise ValueError(f"{n} elements cannot be divided over {k} ranks")
            return {"ar": n, "rs": n // k, "own": n // k, "ag": n * k}[op]
        if op == "add" and n != known[inputs[1]]:
            raise ValueError(f"{n} and {known[inputs[1]]} elements cannot be added")
        if op == "cat":
            return n + known[inputs[1]]
        if op in ("cut", "linear"):
            first, second = more
            if not all(type(each) is int and each >= 0 for each in more) or (op == "cut" and not first < second <= n):
                raise ValueError(f"{more!r} is none of {'[from, to] in ' + str(n) if op == 'cut' else '[rows, which]'}")
            return int(second - first if op == "cut" else first)
        if op == "scale" and (type(more) is not int or not 0 <= more < PRIME):
            raise ValueError(f"the factor {more!r} must be a whole number below {PRIME}")
        return n

    def to_json(self) -> str:
        rows = ",\n".join(json.dumps([op, out, inputs, group, *([] if more is None else [more])])
                          for op, out, inputs, group, more in self.lines)  # fmt: skip
        head = {"format": FORMAT, "axes": self.axes, "inputs": self.inputs, "outputs": self.outputs}
        return f'{json.dumps(head)[:-1]}, "lines": [\n{rows}\n]}}\n'


def _note(known: dict[str, int], name: Any, length: Any) -> None:
    if not named(name, 64) or not name or name in known:
        raise ValueError(f"{str(name)[:40]!r} is no new name")
    if type(length) is not int or not 1 <= length <= ELEMENTS_MAX:
        raise ValueError(f"{name} has {length!r} elements: there are 1 to {ELEMENTS_MAX}")
    known[name] = length


def groups(axes: Sequence[tuple[str, int]]) -> dict[str, list[list[int]]]:
    """The ranks of each group of a grid."""
    names, lengths = [name for name, _ in axes], [length for _, length in axes]
    if len(set(names)) < len(names) or not all(named(name, 64) and name and "+" not in name for name in names):
        raise ValueError("axes have different names, without + and of at most 64 letters that can be printed")
    points = list(itertools.product(*map(range, lengths)))
    found = {}
    for k in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), k):
            lines: dict[Any, list[int]] = {}
            for rank, point in enumerate(points):
                lines.setdefault(tuple(x for i, x in enumerate(point) if i not in chosen), []).append(rank)
            found["+".join(names[i] for i in chosen)] = list(lines.values())
    return found


def from_json(text: str, origin: str = "program") -> Program:
    """The program of a file; origin: its name, for errors. Raises PlanError."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"its format is {str(found)[:40]!r}, this version reads {FORMAT!r}")
        axes = tuple((name, length) for name, length in content["axes"])
        if any(type(length) is not int for _, length in axes):
            raise ValueError("the length of an axis is a whole number")
        lines = tuple(map(_line, content["lines"], itertools.count(1)))
        program = Program(axes, dict(content["inputs"]), lines, tuple(content["outputs"]))
        if program.size * sum(program.lengths.values()) > CELLS_MAX:  # what a proof would have in memory
            raise ValueError(f"its vectors have more than {CELLS_MAX} elements on all ranks together")
        work = 0
        for number, line in enumerate(lines, 1):
            rows = line.more[0] if line.op == "linear" else 1
            work += program.size * program.lengths[line.inputs[0]] * rows
            if work > WORK_MAX:
                raise ValueError(f"up to line {number} an evaluation makes more than {WORK_MAX} products and sums")
        return program
    except PlanError as error:
        raise PlanError(f"{origin}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{origin}: not a program: {problem[:200]} [HVD006]") from None


def _line(row: Any, number: int) -> ProgramLine:
    if not isinstance(row, list) or not 4 <= len(row) <= 5 or not isinstance(row[2], list):
        raise ValueError(f"line {number} is not [op, out, [in, ...], group] or one thing more")
    op, out, inputs, group, *more = row
    if not all(isinstance(each, str) for each in (op, out, *inputs, group or "")):
        raise ValueError(f"line {number} has a name that is no text")
    return ProgramLine(
        op, out, tuple(inputs), group, (tuple(more[0]) if isinstance(more[0], list) else more[0]) if more else None
    )


def evaluate(program: Program, seed: int = 0) -> Vectors:
    """All vectors of all ranks, for inputs that are random integers modulo a prime."""
    draw = np.random.default_rng(seed)
    ranks = range(program.size)
    env: Vectors = {name: [draw.integers(0, PRIME, n) for _ in ranks] for name, n in program.inputs.items()}
    for op, out, inputs, group, more in program.lines:
        x = [env[name] for name in inputs]
        if op in COLLECTIVES:
            env[out] = _collective(op, x[0], program.parts[group or ""])
        elif op == "linear":
            matrix = np.random.default_rng(more[1]).integers(0, PRIME, (more[0], len(x[0][0])))
            env[out] = [(matrix * v % PRIME).sum(1) % PRIME for v in x[0]]
        elif op == "scale":
            env[out] = [v * more % PRIME for v in x[0]]
        elif op == "cut":
            env[out] = [v[more[0] : more[1]] for v in x[0]]
        else:
            env[out] = [(a + b) % PRIME if op == "add" else np.concatenate([a, b]) for a, b in zip(*x)]
    return env


def _collective(op: str, x: list[Any], parts: list[list[int]]) -> list[Any]:
    made: list[Any] = [None] * len(x)
    for part in parts:
        whole = sum(x[r] for r in part) % PRIME if op in ("ar", "rs") else np.concatenate([x[r] for r in part])
        for i, r in enumerate(part):
            made[r] = whole if op in ("ar", "ag") else (whole if op == "rs" else x[r]).reshape(len(part), -1)[i]
    return made


def same(a: Program, b: Program, seed: int = 0) -> bool:
    """Whether both give the same outputs on all ranks. Programs are linear, so one random point tells all but one of
    2^31 wrong ones (Schwartz and Zippel; PET, Wang et al., OSDI 2021, needs a few points)."""
    one, two = evaluate(a, seed), evaluate(b, seed)
    return all(np.array_equal(x, y) for name in a.outputs for x, y in zip(one[name], two[name]))


@dataclass(frozen=True)
class Where:
    """hosts: of each rank. inside, across: (ns, ns a byte) of a message on a host, and between hosts: its ranks share
    one wire. unit: bytes that an element stands for. flops: of a rank in a second."""

    hosts: Sequence[int]
    inside: tuple[float, float]
    across: tuple[float, float]
    unit: float = 4.0
    flops: float = 1e12


class Price(NamedTuple):
    """off: bytes that leave the busiest host."""

    ns: float
    off: float


def price(program: Program, where: Where) -> Price:
    """Of a program whose lines run one after the other, collectives as rings. Raises PlanError."""
    if len(where.hosts) != program.size:
        raise PlanError(
            f"{len(where.hosts)} hosts are named for {program.size} ranks: name one host for each rank [HVD006]"
        )
    ns, n, off = 0.0, program.lengths, dict[int, float]()
    for op, out, inputs, group, _ in program.lines:
        if op == "linear":
            ns += 1e9 * 2 * n[out] * n[inputs[0]] * where.unit / 4 / where.flops
        elif op in ("ar", "rs", "ag"):
            slowest, sent = 0.0, dict[int, float]()
            for part in program.parts[group or ""]:
                k, times = len(part), 2 if op == "ar" else 1
                each = times * (k - 1) / k * where.unit * n[out if op == "ag" else inputs[0]]
                leave = [where.hosts[r] for i, r in enumerate(part) if where.hosts[r] != where.hosts[part[(i + 1) % k]]]
                for host in leave:
                    sent[host] = sent.get(host, 0.0) + each
                took = where.across[0] if leave else where.inside[0]
                slowest = max(slowest, times * (k - 1) * took + (0.0 if leave else each * where.inside[1]))
            ns += slowest + max(sent.values(), default=0.0) * where.across[1]
            for host, count in sent.items():
                off[host] = off.get(host, 0.0) + count
    return Price(ns, max(off.values(), default=0.0))
