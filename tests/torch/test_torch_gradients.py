"""Gradients of the collectives against one process that plays all ranks, on all ranks and on process sets.

Each rank's loss is a weighted sum of its result, the weights different on every rank; the reference computes all ranks'
results from all ranks' inputs and differentiates the sum of the losses. That is the exact gradient; where Horovod's
differs, it does so by a known factor.
"""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

SIZES = (1, 2, 3)
ROWS = 5


def given(rank, rows=ROWS):
    return torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2) + 10.0 * rank + 1


def weight(rank, like):
    """A weight for each element, positive and different on every rank."""
    return torch.arange(1.0, like.numel() + 1, dtype=torch.float64).reshape(like.shape) * (rank + 1)


def shares(tensor, n):
    """The rows that a reducescatter gives to each of n ranks."""
    return tensor.split([len(tensor) // n + (i < len(tensor) % n) for i in range(n)])


def splits(i, n, rows):
    """How many of its rows rank i sends to each; it keeps the last one for itself alone and sends it to nobody."""
    counts = [0] * n
    for row in range(rows - 1):
        counts[(row + i) % n] += 1
    return counts


def swapped(xs):
    """All ranks' results of an alltoall."""
    n = len(xs)
    cut = [x[:-1].split(splits(i, n, len(x))) for i, x in enumerate(xs)]
    return [torch.cat([cut[i][to] for i in range(n)]) for to in range(n)]


def mean(xs):
    return sum(xs) / len(xs)


SCALED = {"prescale_factor": 0.5, "postscale_factor": 3.0}
ROOT = -1  # the last of the members

# name -> (this rank's call of (x, members, set), all ranks' results of all ranks' inputs, Horovod's factor for n ranks)
CASES = {
    "allreduce": (lambda x, m, s: hvd.allreduce(x, process_set=s, name="a"), lambda xs: [mean(xs)] * len(xs), None),
    "allreduce sum, scaled": (
        lambda x, m, s: hvd.allreduce(x, op=hvd.Sum, process_set=s, **SCALED),
        lambda xs: [1.5 * sum(xs)] * len(xs),
        None,
    ),
    "grouped_allreduce": (
        lambda x, m, s: torch.cat(hvd.grouped_allreduce([x, x * x], op=hvd.Sum, process_set=s, **SCALED)),
        lambda xs: [1.5 * torch.cat([sum(xs), sum(x * x for x in xs)])] * len(xs),
        None,
    ),
    "allgather": (
        lambda x, m, s: hvd.allgather(x, process_set=s, name="g"),
        lambda xs: [torch.cat(xs)] * len(xs),
        lambda n: 1 / n,
    ),
    "allgather exact": (
        lambda x, m, s: hvd.allgather(x, process_set=s, exact_grad=True),
        lambda xs: [torch.cat(xs)] * len(xs),
        None,
    ),
    "grouped_allgather": (
        lambda x, m, s: torch.cat(hvd.grouped_allgather([x, x[1:] * 2], process_set=s)),
        lambda xs: [torch.cat([*xs, *(x[1:] * 2 for x in xs)])] * len(xs),
        lambda n: 1 / n,
    ),
    "grouped_allgather exact": (
        lambda x, m, s: torch.cat(hvd.grouped_allgather([x, x[1:] * 2], "gg", s, exact_grad=True)),
        lambda xs: [torch.cat([*xs, *(x[1:] * 2 for x in xs)])] * len(xs),
        None,
    ),
    "broadcast": (
        lambda x, m, s: hvd.broadcast(x[:ROWS], m[ROOT], process_set=s),
        lambda xs: [xs[ROOT][:ROWS]] * len(xs),
        lambda n: 1 / n,
    ),
    "broadcast exact": (
        lambda x, m, s: hvd.broadcast(x[:ROWS], m[ROOT], "b", s, exact_grad=True),
        lambda xs: [xs[ROOT][:ROWS]] * len(xs),
        None,
    ),
    "alltoall": (
        lambda x, m, s: hvd.alltoall(x, splits(s.rank(), len(m), len(x)), "t", s)[0],
        swapped,
        None,
    ),
    "reducescatter": (
        lambda x, m, s: hvd.reducescatter(x[:ROWS], process_set=s),
        lambda xs: shares(mean([x[:ROWS] for x in xs]), len(xs)),
        lambda n: n,
    ),
    "reducescatter sum, scaled": (
        lambda x, m, s: hvd.reducescatter(x[:ROWS], op=hvd.Sum, process_set=s, **SCALED),
        lambda xs: shares(1.5 * sum(x[:ROWS] for x in xs), len(xs)),
        lambda n: n,
    ),
    "reducescatter exact": (
        lambda x, m, s: hvd.reducescatter(x[:ROWS], process_set=s, exact_grad=True),
        lambda xs: shares(mean([x[:ROWS] for x in xs]), len(xs)),
        None,
    ),
    "grouped_reducescatter": (
        lambda x, m, s: torch.cat(hvd.grouped_reducescatter([x[:ROWS], x[:2] * x[:2]], op=hvd.Sum, process_set=s)),
        lambda xs: [
            torch.cat(two)
            for two in zip(shares(sum(x[:ROWS] for x in xs), len(xs)), shares(sum(x[:2] ** 2 for x in xs), len(xs)))
        ],
        lambda n: n,
    ),
    "reduce": (
        lambda x, m, s: hvd.reduce(x[:ROWS], m[ROOT], op=hvd.Average, process_set=s, **SCALED),
        lambda xs: [xs[0][:0]] * (len(xs) - 1) + [1.5 * mean([x[:ROWS] for x in xs])],
        None,
    ),
    "gather": (
        lambda x, m, s: hvd.gather(x, m[ROOT], process_set=s),
        lambda xs: [xs[0][:0]] * (len(xs) - 1) + [torch.cat(xs)],
        None,
    ),
    "scatter": (
        lambda x, m, s: hvd.scatter(x if hvd.rank() == m[0] else None, m[0], splits(0, len(m), len(x)), "s", s),
        lambda xs: list(xs[0][:-1].split(splits(0, len(xs), len(xs[0])))),
        None,
    ),
}
SAME_SHAPE = ("allreduce", "grouped_allreduce")  # the others may get a different number of rows on every rank


def rows_of(case, rank):
    return ROWS if case.startswith(SAME_SHAPE) else ROWS + rank


def check(case, members, process_set):
    call, all_results, factor = CASES[case]
    n, own = len(members), members.index(hvd.rank())
    xs = [given(r, rows_of(case, r)).requires_grad_() for r in members]
    results = all_results(xs)
    loss = sum((weight(i, result) * result).sum() for i, result in enumerate(results))
    expected = torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)[own]
    x = given(hvd.rank(), rows_of(case, hvd.rank())).requires_grad_()
    result = call(x, members, process_set)
    assert torch.equal(result.detach().reshape(results[own].shape), results[own].detach())
    (weight(own, result) * result).sum().backward()
    mine = x.grad if x.grad is not None else torch.zeros_like(x)
    torch.testing.assert_close(mine, expected * (factor(n) if factor else 1))


@pytest.mark.parametrize("case", CASES)
@as_ranks(*SIZES)
def test_gradients_equal_those_of_one_process(case):
    check(case, list(range(hvd.size())), hvd.global_process_set)


@as_ranks(3, 4)
def test_gradients_on_process_sets():
    members = [0, hvd.size() - 1]
    some = hvd.add_process_set(members)
    for case in CASES:
        if some.included():
            check(case, members, some)
    assert hvd.remove_process_set(some)


@as_ranks(2)
def test_gradients_of_gradients():
    x = torch.tensor([2.0 + hvd.rank()], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Sum), x, create_graph=True)
    torch.testing.assert_close(first, hvd.size() * 3 * x**2)  # both ranks' losses depend on x
    (second,) = torch.autograd.grad(first, x)
    torch.testing.assert_close(second, hvd.size() * 6 * x)


@as_ranks(2)
def test_groups_may_hold_tensors_without_gradient():
    x = torch.full((2,), 3.0, requires_grad=True)
    count, scaled, fixed = hvd.grouped_allreduce([torch.tensor([4]), x * 2, torch.ones(2)], op=hvd.Sum, name="mixed")
    assert count.item() == 4 * hvd.size() and not count.requires_grad
    (scaled.sum() + fixed.sum()).backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0 * hvd.size()))


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
@as_ranks(1, 2)
def test_ops_without_a_gradient_say_so(op):
    x = torch.ones(2, requires_grad=True)
    number = getattr(hvd, op)
    for result in (hvd.allreduce(x, op=number), hvd.grouped_allreduce([x], op=number)[0]):
        with pytest.raises(NotImplementedError, match=op.lower()):
            result.sum().backward()
    assert not hvd.allreduce(x.detach(), op=number).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(x, op=number).requires_grad


@as_ranks(2)
def test_compression_keeps_the_gradient():
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        x = torch.full((4,), 1.5, dtype=torch.float64, requires_grad=True)
        for call in (
            lambda x, c: hvd.allreduce(x, None, "c", c, hvd.Sum),
            lambda x, c: hvd.grouped_allreduce([x], compression=c, op=hvd.Sum)[0],
            lambda x, c: hvd.reducescatter(x, None, c, hvd.Sum) * 1,
        ):
            x.grad = None
            result = call(x, compression)
            assert result.dtype == torch.float64 and (result == 1.5 * hvd.size()).all()
            result.sum().backward()
            assert x.grad.dtype == torch.float64 and (x.grad == hvd.size()).all() or "scatter" in str(call)

        class Doubling(hvd.Compressor):
            @staticmethod
            def compress(tensor):
                return tensor.to(dtype) * 2, tensor.dtype  # noqa: B023

            @staticmethod
            def decompress(tensor, ctx):
                return (tensor / 2).to(ctx)

        assert (hvd.allreduce(x.detach(), compression=Doubling) == 1.5).all()
    with pytest.raises(TypeError, match="compression"):
        hvd.allreduce(torch.ones(1), compression="fp16")


@as_ranks(1, 2)
def test_in_place_forms_take_leaves_that_require_grad():
    x = torch.full((3,), float(hvd.rank()), requires_grad=True)
    assert hvd.allreduce_(x, op=hvd.Sum) is x and hvd.broadcast_(x, 0) is x
    assert hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Max)) is x
    assert hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Min))[0] is x
    assert x.is_leaf and x.requires_grad and x.grad is None


@as_ranks(2)
def test_a_compiled_function_may_call_collectives():
    @torch.compile(backend="eager")
    def step(x):
        y = hvd.allreduce(x * 2, op=hvd.Sum) * (hvd.size() - hvd.rank() > 0)
        z = hvd.allgather(y + 1)
        return z.sum() + hvd.synchronize(hvd.allreduce_async(y, op=hvd.Sum)).sum().detach()

    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        assert step(x).item() == 2 * 15 + 3 * 8
        step(x).backward()
        assert torch.equal(x.grad, torch.full((3,), 4.0))


@as_ranks(2)
def test_what_comes_after_a_time_limit_has_its_gradient():
    """Rank 0 loses patience (rank 1 comes when it hears so), and synchronizes the handle of the error."""
    for call, expected in (
        (lambda x, **k: hvd.allreduce(x, op=hvd.Sum, name="late", **k), [2.0, 2.0]),
        (lambda x, **k: hvd.grouped_allreduce([x], op=hvd.Sum, name="late", **k), [2.0, 2.0]),
        (lambda x, **k: hvd.scatter(x if hvd.rank() == 0 else None, 0, name="late", **k), [1.0, None]),
    ):
        x = torch.full((2,), 3.0, requires_grad=True)
        if hvd.rank() == 0:
            with pytest.raises(hvd.HvdTimeoutError, match="missing on rank 1") as caught:
                call(x, timeout=0.05)
            hvd.send(torch.ones(1), 1, name="raised")
            result = hvd.synchronize(caught.value.handle)
        else:
            hvd.recv(torch.ones(1), 0, name="raised")
            result = call(x)
        (result[0] if isinstance(result, list) else result).sum().backward()
        wanted = expected[hvd.rank()]
        assert x.grad is None if wanted is None else (x.grad == wanted).all(), x.grad
