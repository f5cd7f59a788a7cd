"""Is the plan that the search finds the best of all, and does the player say of 1F1B and GPipe what the papers say?

`forward` has the formulas from the first stage to the last, as the papers write them, and `all_plans` tries everything.
The search goes from the last stage to the first and drops most.
"""

import random
import time
from itertools import combinations, product

import pytest
from ranks import EVERYTHING, everything

from hvdlite.parallel import schedule
from hvdlite.plan import search
from hvdlite.plan.pipeline import makespan
from hvdlite.plan.search import Chain, Cut, Layer, PlanError, best, least_memory, played

BLOCK = Layer("block", 4.0, 8.0, 8e6, 4e6, 4e6, heads=4, sync=8e6)


def chain_of(draw, n, kinds, memory=True):
    layers = []
    for at in range(n):
        ms, back, heads = draw.uniform(1, 10), draw.uniform(1.6, 2.4), draw.choice((0, 2, 4, 8))
        sizes = [draw.uniform(0.1, 20), draw.uniform(0.1, 60), draw.uniform(1, 10)]
        layers.append(Layer(f"layer {at}", ms, ms * back, *sizes, heads, draw.uniform(0.1, 10)))
    need = sum(4 * layer.weights + layer.stash for layer in layers)
    limit = need * draw.uniform(0.3, 1.2) if memory else float("inf")
    return Chain(layers, draw.uniform(0.01, 2), draw.choice((1, 4, 8)), limit, kinds=kinds)


def forward(chain, stages, objective):
    """ms of a plan, None where it does not fit; and the memory that it needs."""
    m, p = chain.micro, len(stages)
    parts = [chain.of_stage(cut, p - 1 - s) for s, cut in enumerate(stages)]
    F, B, AR, C, memory = (list(each) for each in zip(*parts))
    if max(memory) > chain.memory:
        return None, max(memory)
    if objective == "throughput":
        return max(max(f + b + a, 2 * c) for f, b, a, c in zip(F, B, AR, C)), max(memory)
    last = sum(F) + sum(B) + 2 * sum(C) + (m - 1) * max(*(f + b for f, b in zip(F, B)), *C)
    before = [sum(B[:s]) + sum(C[1 : s + 1]) for s in range(p)]
    return last + max(ar - late for ar, late in zip(AR, before)), max(memory)


def all_plans(chain, ranks):
    n = len(chain.layers)
    for p in range(1, min(ranks, n) + 1):
        for cuts, split in product(combinations(range(1, n), p - 1), product(range(1, ranks + 1), repeat=p)):
            if sum(split) == ranks:
                edges = list(zip((0, *cuts), (*cuts, n), split))
                kinds = [[c.kind for c in chain.choices(chain.layers[i], r)] for a, b, r in edges for i in range(a, b)]
                for chosen in product(*kinds):
                    yield [Cut(a, b, r, chosen[a:b]) for a, b, r in edges]


@pytest.mark.parametrize(
    "n, ranks, kinds, objective, cases",
    [
        (*case, many if EVERYTHING else few)
        for *case, few, many in [
            (8, 4, ("dp",), "throughput", 100, 500),
            (8, 4, ("dp",), "latency", 60, 200),
            (4, 4, search.KINDS, "latency", 30, 200),
            *everything((6, 4, search.KINDS, "latency", 0, 200)),
        ]
    ],
)
def test_the_search_equals_trying_everything(n, ranks, kinds, objective, cases):
    draw = random.Random(n + len(kinds) + len(objective))
    for _ in range(cases):
        chain = chain_of(draw, n, kinds)
        tried = [forward(chain, stages, objective) for stages in all_plans(chain, ranks)]
        least = min(memory for _, memory in tried)
        assert least_memory(chain, ranks) == pytest.approx(least)
        wanted = min((ms for ms, _ in tried if ms is not None), default=None)
        if wanted is None:
            with pytest.raises(PlanError, match=r"fits into \d+ bytes of memory: the minimum is \d+ bytes \[HVD005\]"):
                best(chain, ranks, objective)
            continue
        found = best(chain, ranks, objective)
        assert found.ms == pytest.approx(wanted, rel=1e-9)
        assert forward(chain, found.stages, objective)[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind, peaks", [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_four_stages_and_eight_micro_batches(kind, peaks):
    orders = [schedule.PLANS[kind](s, 4, 8, 1) for s in range(4)]
    found = makespan(orders, [1] * 4, [2] * 4)
    assert (found.end, found.peaks, found.busy) == (33, peaks, [24] * 4)
    slower = makespan(orders, [1] * 4, [2] * 4, comm=[0.5] * 3, sums=[7, 0, 0, 0])
    assert slower.end > 33 + 7 and sum(span[0] == "send" for span in slower.spans) == 48


def test_the_formula_is_near_what_is_played():
    draw, errors = random.Random(8), []
    for _ in range(200 if EVERYTHING else 40):
        chain = chain_of(draw, 8, ("dp",), memory=False)
        chain.beta /= 4
        found = best(chain, 4)
        errors.append(abs(played(chain, found).end / found.ms - 1))
    assert sum(errors) / len(errors) < 0.02


def test_a_hundred_layers_on_sixteen_ranks_are_quick():
    chain = chain_of(random.Random(6), 100, ("dp",), memory=False)
    begin = time.process_time()
    assert best(chain, 16, "throughput").stages[-1].end == 100
    assert time.process_time() - begin < 8


@pytest.mark.parametrize("why, call", [
    ("0 layers", lambda: Chain([], 1.0, 1)),
    ("0 micro-batches", lambda: Chain([BLOCK], 1.0, 0)),
    ("2.0 micro-batches", lambda: Chain([BLOCK], 1.0, 2.0)),
    ("weights is -1", lambda: Layer("a", 1, 1, 1, -1)),
    ("stash is nan", lambda: Layer("a", 1, 1, 1, 1, float("nan"))),
    ("heads is 1.5: it must be a whole", lambda: Layer("a", 1, 1, 1, 1, 1, 1.5)),
    ("beta inf", lambda: Chain([BLOCK], float("inf"), 1)),
    ("include dp", lambda: Chain([BLOCK], 1.0, 1, kinds=("tp",))),
    ("0 ranks", lambda: best(Chain([BLOCK], 1.0, 1), 0)),
    ("not 'speed'", lambda: best(Chain([BLOCK], 1.0, 1), 1, "speed")),
    ("1 layers cannot be split into stages of 1", lambda: best(Chain([BLOCK], 1.0, 1), 2, each=1)),
])  # fmt: skip
def test_what_cannot_be_planned(why, call):
    with pytest.raises(ValueError, match=rf"{why}.*\[HVD00[58]\]"):
        call()
