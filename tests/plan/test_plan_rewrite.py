"""Does a rewritten program give the same on all ranks, and is one that does not told?

Programs are random lines on a grid of 2 x 2 x 2 ranks, made so that rules find what they look for. Two programs are
compared on random integers, as the search compares them; the sums of a small one are checked by hand.
"""

import itertools
import json
import random

import numpy as np
import pytest
from ranks import EVERYTHING

from hvdlite.plan.program import PRIME, PlanError, Program, ProgramLine, Where, evaluate, from_json, price, same
from hvdlite.plan.rewrite import improve, rewrites

AXES = (("host", 2), ("dp", 2), ("tp", 2))
INPUTS = {"x": 16, "y": 16, "z": 8}
STEP = (
    ProgramLine("ar", "a", ("act",), "tp"),
    ProgramLine("linear", "h", ("a",), None, (4, 1)),
    ProgramLine("ar", "s1", ("g1",), "host+dp"),
    ProgramLine("ar", "s2", ("g2",), "host+dp"),
    ProgramLine("own", "p1", ("s1",), "dp"),
    ProgramLine("own", "p2", ("s2",), "dp"),
)
FOLLOW = {"ar": ("own", "ar", "linear"), "ag": ("own", "rs"), "rs": ("ag",), "own": ("ag",)}


def random_program(draw):
    made, kind, program = [], {}, Program(AXES, INPUTS, (), ("x",))
    for i in range(draw.randrange(3, 7)):
        name, out, group = draw.choice(list(program.lengths)[-3:]), f"v{i}", draw.choice(list(program.parts))
        op = draw.choice(("ar", "ar", "rs", "ag", "own", "scale", "add", "linear"))
        if name in kind and draw.random() < 0.5:  # what a rule looks for
            op, group = draw.choice(FOLLOW[kind[name][0]]), kind[name][1]
        n, k = program.lengths[name], len(program.parts[group][0])
        if (op in ("rs", "own") and n % k) or (op == "ag" and n * k > 64):
            op = "ar"
        if draw.random() < 0.15:  # two of a kind, for sums
            made += [ProgramLine("ar", f"a{i}", ("x",), group), ProgramLine("ar", f"b{i}", ("y",), group)]
            made.append(ProgramLine("add", out, (f"a{i}", f"b{i}")))
        elif op in ("scale", "linear"):
            made.append(ProgramLine(op, out, (name,), None, draw.randrange(2, 9) if op == "scale" else (8, i)))
        elif op == "add":
            made.append(ProgramLine(op, out, (name, draw.choice([x for x, m in program.lengths.items() if m == n]))))
        else:
            made.append(ProgramLine(op, out, (name,), group))
            kind[out] = op, group
        read = {name for line in made for name in line.inputs}
        program = Program(AXES, INPUTS, tuple(made), tuple(line.out for line in made if line.out not in read))
    return program


def test_collectives_are_what_they_are_called():
    lines = [ProgramLine(op, op, ("x",), "dp") for op in ("ar", "rs", "ag", "own")]
    of = evaluate(Program((("dp", 2),), {"x": 4}, tuple(lines), ("ar",)))
    a, b = of["x"]
    assert np.array_equal(of["ar"][1], (a + b) % PRIME) and np.array_equal(of["rs"][1], ((a + b) % PRIME)[2:])
    assert np.array_equal(of["ag"][0], [*a, *b]) and np.array_equal(of["own"][1], b[2:])


def test_every_rule_keeps_what_a_program_gives():
    draw, counts, times = random.Random(4), {}, 100 if EVERYTHING else 15
    for case in range(20000):
        program, number = random_program(draw), itertools.count()
        for rule, other in rewrites(program, lambda number=number: f"_{next(number)}"):
            if counts.get(rule, 0) < times:
                counts[rule] = counts.get(rule, 0) + 1
                assert same(program, other, case), (rule, program)
        if len(counts) == 12 and min(counts.values()) == times:
            break
    assert len(counts) == 12 and min(counts.values()) == times, counts


def test_wrong_programs_are_told_from_the_right_ones():
    draw, told, cases = random.Random(12), 0, 0
    while cases < 200:
        program = random_program(draw)
        places = [i for i, line in enumerate(program.lines) if line.op in ("ar", "scale")]
        if not places:
            continue
        i, cases = draw.choice(places), cases + 1
        line = program.lines[i]
        if line.op == "ar":
            wrong = line._replace(group=draw.choice([g for g in program.parts if g != line.group]))
        else:
            wrong = line._replace(more=line.more + 1)
        other = Program(AXES, INPUTS, (*program.lines[:i], wrong, *program.lines[i + 1 :]), program.outputs)
        if same(program, other, cases):  # by chance of replicas: then no other point tells them apart, either
            assert all(same(program, other, 1000 + seed) for seed in range(5))
        else:
            told += 1
    assert told >= 180


def test_a_step_of_two_hosts_sends_less_between_them():
    program = Program(AXES, {"act": 16, "g1": 64, "g2": 64}, STEP, ("h", "p1", "p2"))
    where = Where([0] * 4 + [1] * 4, (2e3, 0.1), (30e3, 8.0), 65536.0)
    found = improve(program, where)
    assert (round(price(program, where).off / 1e6, 1), round(found.price.off / 1e6, 1)) == (25.2, 16.8)
    assert found.price.ns < 0.7 * price(program, where).ns and found.refused == 0 and found.proved > 50
    assert same(program, found.program, 99) and found.price == price(found.program, where) and found.rules
    again = from_json(found.program.to_json())
    assert again == found.program


GOOD = {"format": "hvdlite-program-1", "axes": [["dp", 2]], "inputs": {"x": 4}, "outputs": ["y"]}
GOOD["lines"] = [["ar", "y", ["x"], "dp"]]


@pytest.mark.parametrize("change, why", [
    ({"format": "other"}, "its format is 'other'"),
    ({"axes": [["dp", 2.0]]}, "the length of an axis is a whole number"),
    ({"axes": [["dp", 2000]]}, "axes and inputs: one to four axes make 1 to 1024 ranks"),
    ({"axes": [["a+b", 2]]}, "without +"),
    ({"inputs": {"x": 10**9}}, "x has 1000000000 elements"),
    ({"outputs": ["z"]}, "outputs: there is no vector 'z'"),
    ({"outputs": []}, "outputs: there is none"),
    ({"lines": [["ar", "y", ["x"]]]}, "line 1 is not"),
    ({"lines": [["ar", "\x1b", ["x"], "dp"]]}, "line 1 .ar ..: '.x1b' is no new name"),
    ({"lines": [["scale", "y", ["x"], "\x1b", 3]]}, "line 1 .scale y.: 'scale' has a group"),
    ({"inputs": {"x": 1024}, "lines": [["linear", "v", ["x"], None, [1024, 0]], ["linear", "y", ["v"], None, [1024, 0]],
                                       ["linear", "z", ["y"], None, [1024, 0]]]}, "up to line 3 an evaluation makes"),
    ({"lines": [["ar", "y", [3], "dp"]]}, "line 1 has a name that is no text"),
    ({"lines": [["ar", "y", ["z"], "dp"]]}, "line 1 .ar y.: there is no vector 'z' yet"),
    ({"lines": [["ar", "y", ["x"], "tp"]]}, "line 1 .ar y.: there is no group 'tp'; there are dp"),
    ({"lines": [["sum", "y", ["x"], "dp"]]}, "line 1 .sum y.: 'sum' on 1 vectors"),
    ({"lines": [["ar", "y", ["x"], "dp"], ["ar", "y", ["x"], "dp"]]}, "line 2 .ar y.: 'y' is no new name"),
    ({"lines": [["rs", "y", ["x"], "dp"]], "inputs": {"x": 3}}, "3 elements cannot be divided over 2 ranks"),
    ({"lines": [["cut", "y", ["x"], None, [2, 9]]]}, "none of .from, to. in 4"),
    ({"lines": [["scale", "y", ["x"], None, 0.5]]}, "the factor 0.5"),
    ({"lines": [["linear", "y", ["x"], None]]}, "line 1 .linear y.:"),
    ({"lines": 3}, "not a program"),
    ({"axes": [["dp", 1024]], "inputs": dict.fromkeys("abcdefghijklmnopqx", 1024)}, "more than 16777216 elements"),
])  # fmt: skip
def test_bad_files_are_refused_by_line(change, why):
    with pytest.raises(PlanError, match=rf"f.json: .*{why.replace('+', '.')}.*\[HVD006\]"):
        from_json(json.dumps({**GOOD, **change}), "f.json")
