"""What moves rows between ranks, on tensors: one matrix of collective, dtype and size, against what every rank gave.

With the errors that this process sees alone, in Horovod's words, and those that ranks only see together.
"""

import numpy
import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

SIZES = (1, 2, 3, 4)
DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def given(rank, rows, dtype):
    numbers = (torch.arange(rows * 6).reshape(rows, 2, 3) * 5 + rank * 3) % 7
    return numbers > 2 if dtype == "bool" else numbers.to(getattr(torch, dtype))


def equal(one, other):
    """torch.equal, which has no float8: there of the bits."""
    if one.dtype == other.dtype and "float8" in str(one.dtype):
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def splits(sender, n):
    """Ragged, with zeros."""
    return [(sender + to) % 3 for to in range(n)]


def alltoall(n, r, dtype):
    all_ranks = [given(s, sum(splits(s, n)), dtype).split(splits(s, n)) for s in range(n)]
    expected = torch.cat([parts[r] for parts in all_ranks])
    received = [splits(s, n)[r] for s in range(n)]
    for kind in (list, tuple, torch.IntTensor, torch.LongTensor):
        result, counts = hvd.alltoall(given(r, sum(splits(r, n)), dtype), kind(splits(r, n)), name="ragged")
        assert counts.tolist() == received and counts.dtype == (
            torch.int64 if kind is torch.LongTensor else torch.int32
        )
        assert equal(result, expected) and result.dtype == expected.dtype
    even = hvd.alltoall(given(r, 2 * n, dtype))
    assert equal(even, torch.cat([given(s, 2 * n, dtype)[2 * r : 2 * r + 2] for s in range(n)]))
    result, counts = hvd.synchronize(hvd.alltoall_async(given(r, 0, dtype)))
    assert result.shape == (0, 2, 3) and counts.tolist() == [0] * n


def gather_and_scatter(n, r, dtype):
    for root in {0, n - 1}:
        rows = [(s + root) % 3 for s in range(n)]
        result = hvd.gather(given(r, rows[r], dtype), root, name="g")
        expected = torch.cat([given(s, rows[s], dtype) for s in range(n)]) if r == root else given(r, 0, dtype)
        assert equal(result, expected) and result.dtype == expected.dtype
        source = given(root, sum(rows), dtype)
        for sent in (source, source.transpose(1, 2).contiguous().transpose(1, 2)):
            part = hvd.scatter(sent if r == root else None, root, rows, name="s")
            assert equal(part, source.split(rows)[r]) and part.dtype == source.dtype
        even = hvd.synchronize(hvd.scatter_async(given(root, n, dtype) if r == root else None, root))
        assert equal(even, given(root, n, dtype)[r : r + 1])


def send_and_recv(n, r, dtype):
    source = given(r, 3, dtype)
    if n == 1:
        return
    handle = hvd.send_async(source, (r + 1) % n)
    got = hvd.recv(torch.empty_like(given(0, 3, dtype)), (r - 1) % n)
    assert hvd.synchronize(handle) is None and equal(got, given((r - 1) % n, 3, dtype))
    if r == 0:
        hvd.send(source, 1, name="named")
    if r == 1:
        target = torch.empty_like(source).transpose(0, 2)
        same = hvd.synchronize(hvd.recv_async(target.transpose(0, 2), 0, name="named"))
        assert equal(same, given(0, 3, dtype)) and equal(target.transpose(0, 2), same)


def grouped_allgather(n, r, dtype):
    members = [given(r, r + 1, dtype), given(r, 2 if r else 0, dtype)[:, 0]]
    for name in (None, "group"):
        first, second = hvd.grouped_allgather(members, name=name)
        assert equal(first, torch.cat([given(s, s + 1, dtype) for s in range(n)]))
        assert equal(second, torch.cat([given(s, 2 if s else 0, dtype)[:, 0] for s in range(n)]))


def shares(tensor, n):
    return tensor.split([len(tensor) // n + (i < len(tensor) % n) for i in range(n)])


def reducescatter_and_reduce(n, r, dtype):
    """Whatever allreduce gives, cut up: that it reduces rightly is tested with allreduce."""
    for op in (hvd.Sum, hvd.Max, hvd.Product) if dtype == "bool" else (hvd.Average, hvd.Sum, hvd.Min, hvd.Product):
        for rows in (0, 1, n, 2 * n + 1):
            whole = hvd.allreduce(given(r, rows, dtype), op=op)
            assert equal(hvd.reducescatter(given(r, rows, dtype), op=op, name="rs"), shares(whole, n)[r])
            assert equal(hvd.synchronize(hvd.reducescatter_async(given(r, rows, dtype), op=op)), shares(whole, n)[r])
            both = hvd.grouped_reducescatter([given(r, rows, dtype), given(r, rows, dtype)[:, 1]], op=op)
            assert equal(both[0], shares(whole, n)[r]) and equal(both[1], shares(whole[:, 1], n)[r])
            got = hvd.reduce(given(r, rows, dtype), n - 1, op=op, name="r")
            assert equal(got, whole if r == n - 1 else whole.new_empty(0))


KINDS = [alltoall, gather_and_scatter, send_and_recv, grouped_allgather, reducescatter_and_reduce]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@as_ranks(*SIZES)
def test_every_dtype_moves(kind):
    for dtype in DTYPES:
        kind(hvd.size(), hvd.rank(), dtype)


@as_ranks(2, 3)
def test_sparse_tensors_are_summed_by_two_allgathers():
    r, n = hvd.rank(), hvd.size()
    indices = torch.tensor([[r, r + 1, 4]] if r else [[]], dtype=torch.int64)
    values = torch.full((indices.shape[1], 2), float(r))
    mine = torch.sparse_coo_tensor(indices, values, (6, 2))
    dense = torch.zeros(6, 2)
    for s in range(1, n):
        dense.index_add_(0, torch.tensor([s, s + 1, 4]), torch.full((3, 2), float(s)))
    for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / n)):
        wait = hvd.sparse_allreduce_async(mine, name="embedding", op=op)
        torch.testing.assert_close(wait().to_dense(), expected)
    for wrong, op in ((torch.ones(3), hvd.Sum), (mine, hvd.Max)):
        with pytest.raises(ValueError, match="sparse"):
            hvd.sparse_allreduce_async(wrong, "x", op)


@as_ranks(1, 2, 3)
def test_splits_that_do_not_fit_are_refused_in_horovods_words():
    n, ones = hvd.size(), torch.ones(2 * hvd.size())
    for given_splits, words in (
        ([n + 1] * n, "Sum of splits entries .* is greater than the first dimension of tensor" if n > 1 else ""),
        ([1] * (n + 1), "Number of entries in splits .* does not equal number of workers"),
        (torch.ones(n, 1, dtype=torch.int32), "alltoall expects a 1D splits tensor"),
        (torch.ones(n), "32-bit integer elements"),
        ([1.0] * n, "integer"),
        ([True] * n, "integer"),
        ([-1] + [1] * (n - 1), "negative"),
    ):
        if not words:
            continue
        with pytest.raises(ValueError, match=words):
            hvd.alltoall(ones, given_splits)
        with pytest.raises(ValueError, match=words):
            hvd.scatter(ones, hvd.rank(), given_splits)
    if n > 1:
        with pytest.raises(
            ValueError, match="splits not provided, but first dimension of tensor .* not an even multiple"
        ):
            hvd.alltoall(torch.ones(2 * n + 1))
    with pytest.raises(TypeError, match="splits to be a 1D tensor"):
        hvd.alltoall(ones, "12")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == n


@as_ranks(1, 2)
def test_arguments_that_cannot_be():
    n, r, ones, scalar = hvd.size(), hvd.rank(), torch.ones(4), torch.tensor(1.0)
    calls = [
        (ValueError, lambda: hvd.alltoall(scalar)),
        (ValueError, lambda: hvd.reducescatter(scalar)),
        (ValueError, lambda: hvd.gather(scalar, 0)),
        (ValueError, lambda: hvd.scatter(scalar, r)),
        (ValueError, lambda: hvd.grouped_allgather([ones, scalar])),
        (ValueError, lambda: hvd.grouped_reducescatter([ones, scalar])),
        (ValueError, lambda: hvd.reducescatter(ones, op=9)),
        (ValueError, lambda: hvd.reduce(ones, 0, op="sum")),
        (ValueError, lambda: hvd.reduce(ones, n)),
        (ValueError, lambda: hvd.gather(ones, -1)),
        (TypeError, lambda: hvd.scatter(ones, "0")),
        (TypeError, lambda: hvd.scatter(None, r)),
        (TypeError, lambda: hvd.reduce(ones, 0.0)),
        (TypeError, lambda: hvd.broadcast(ones, None)),
        (ValueError, lambda: hvd.send(ones, r)),
        (ValueError, lambda: hvd.recv(ones, r)),
        (ValueError, lambda: hvd.send(ones, n)),
        (TypeError, lambda: hvd.allreduce([1.0])),
        (TypeError, lambda: hvd.recv([1.0], (r + 1) % n)),
        (TypeError, lambda: hvd.send(ones, (r + 1) % n, name=3) if n > 1 else hvd.send(1, 0)),
        (TypeError, lambda: hvd.grouped_allgather(ones)),
        (TypeError, lambda: hvd.grouped_reducescatter("ab")),
        (TypeError, lambda: hvd.alltoall(ones, process_set=1)),
        (TypeError, lambda: hvd.join("cpu")),
        (ValueError, lambda: hvd.reduce(torch.ones(2, dtype=torch.complex64), 0)),
        (ValueError, lambda: hvd.alltoall(torch.eye(4).to_sparse())),
        (TypeError, lambda: hvd.alltoall(None)),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == n


@as_ranks(2, 3)
def test_ranks_that_disagree_are_named_with_the_tensor():
    last = hvd.rank() == hvd.size() - 1
    for name, call in (
        ("width", lambda: hvd.alltoall(torch.ones(hvd.size(), 3 if last else 2), name="width")),
        ("kind", lambda: hvd.reducescatter(torch.ones(4), name="kind", op=hvd.Max if last else hvd.Sum)),
        ("rows", lambda: hvd.reducescatter(torch.ones(5 if last else 4), name="rows")),
        ("root", lambda: hvd.reduce(torch.ones(4), 0 if last else 1, name="root")),
        ("gather", lambda: hvd.gather(torch.ones(4), 0 if last else 1)),
        ("scatter", lambda: hvd.scatter(torch.ones(hvd.size()), 0 if last else 1)),
        ("dtype", lambda: hvd.grouped_allgather([torch.ones(2, dtype=torch.int32 if last else None)], name="dtype")),
    ):
        with pytest.raises(
            hvd.HvdMismatchError, match=f"(?s)(?=.*({name}|root rank))(?=.*rank 0|.*ranks 0)(?=.*{hvd.size() - 1})"
        ):
            call()
    if hvd.rank() < 2:
        tensor = torch.ones(3 + hvd.rank())
        with pytest.raises(hvd.HvdMismatchError, match="send"):
            hvd.recv(tensor, 0, name="m") if hvd.rank() else hvd.send(tensor, 1, name="m")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@as_ranks(1, 2)
def test_handles_are_opaque_and_may_be_kept_anywhere():
    handles = {hvd.allreduce_async(torch.full((2,), float(i)), op=hvd.Sum): i for i in range(3)}
    for handle, i in handles.items():
        assert (hvd.synchronize(handle) == i * hvd.size()).all() and hvd.poll(handle)
        assert (hvd.synchronize(handle) == i * hvd.size()).all()
    assert len({*handles, *handles}) == 3


@as_ranks(2, 3)
def test_joined_ranks_give_nothing_and_the_last_one_is_told():
    """Rank r has r + 1 batches."""
    n, r = hvd.size(), hvd.rank()
    for step in range(r + 1):
        total = hvd.allreduce(torch.ones(4), op=hvd.Sum, name=f"step{step}")
        assert (total == n - step).all()
        mean = hvd.allreduce(torch.ones(4, dtype=torch.float64), name=f"mean{step}")
        torch.testing.assert_close(mean, torch.full((4,), (n - step) / n, dtype=torch.float64))
        if step == n - 1 > 0:  # alone: all others have joined
            for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda t: hvd.broadcast(t, r)):
                with pytest.raises(hvd.HvdError, match="(?i)join"):
                    call(torch.ones(n))
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * n and last == n - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == n


@as_ranks(2)
def test_a_refused_group_leaves_nothing_behind():
    good = torch.ones(2)
    for collective in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="bool"):
            collective([good, good.bool()], name="half", op=hvd.Average)
        assert [tensor.tolist() for tensor in collective([good, good], name="half")] == [
            [1.0] * (2 if collective is hvd.grouped_allreduce else 1)
        ] * 2


@as_ranks(2)
def test_autograd_finds_out_that_a_tensor_was_overwritten():
    for overwrite in (
        lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum),
        lambda tensor: hvd.broadcast_(tensor, 0),
        lambda tensor: hvd.grouped_allreduce_([tensor]),
    ):
        weight, factor = torch.ones(2, requires_grad=True), torch.ones(2)
        result = (weight * factor).sum()
        overwrite(factor)
        with pytest.raises(RuntimeError, match="inplace operation"):
            result.backward()


@pytest.mark.parametrize("kind", ["numpy", "numpy numbers", "tensors", "range"])
@as_ranks(2)
def test_splits_may_be_any_list_of_whole_numbers(kind):
    splits = {
        "numpy": numpy.array([1, 1], numpy.int32),
        "numpy numbers": [numpy.int64(1)] * 2,
        "tensors": [torch.tensor(1)] * 2,
        "range": range(1, 3),
    }[kind]
    result, received = hvd.alltoall(torch.arange(3.0), splits)
    assert received.tolist() == [int(splits[hvd.rank()])] * 2 and len(result) == sum(received)
