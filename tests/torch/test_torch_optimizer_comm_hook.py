"""Communication hooks: a user's function reduces buckets, as with DistributedDataParallel."""

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, loss_of, network, pair
from test_torch_optimizer_graphs import Tied

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def in_future(state, bucket):
    future = torch.futures.Future()
    future.set_result(hvd.allreduce(bucket.buffer()))
    return future


def by_handle(state, bucket):
    return hvd.allreduce_async(bucket.buffer())


def in_place(state, bucket):
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters()):
        assert gradient.shape == parameter.shape
        gradient.div_(hvd.size())
    hvd.allreduce_(bucket.buffer(), op=hvd.Sum)
    return bucket.buffer()


def halved(state, bucket):
    """As torch's fp16_compress_hook: then() on the future, the result in the bucket's own buffer."""
    future = torch.futures.Future()
    future.set_result(hvd.allreduce(bucket.buffer().to(torch.float32)))

    def restore(future):
        bucket.buffer().copy_(future.value())
        return bucket.buffer()

    return future.then(restore)


HOOKS = {"future": in_future, "handle": by_handle, "in place": in_place}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("cap", [25.0, 0.0001], ids=["one bucket", "many buckets"])
@as_ranks(2, 3)
def test_training_with_a_hook_equals_one_process(hook, cap):
    worlds = pair()
    worlds[1].register_comm_hook(None, HOOKS[hook], bucket_cap_mb=cap)
    for step in range(4):
        for model, optimizer, rows in zip(worlds[::2], worlds[1::2], reversed(batch(step))):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_a_hook_that_compresses_with_then():
    model, optimizer, reference, plain = pair()
    optimizer.register_comm_hook(None, halved)
    for this, opt, rows in ((model, optimizer, batch(0)[1]), (reference, plain, batch(0)[0])):
        loss_of(this, rows).backward()
        opt.step()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@as_ranks(2)
def test_buckets_are_the_same_on_all_ranks_and_follow_the_order_of_the_first():
    """Each rank uses the branches in another order; rank 1 leaves one out. Unnamed collectives still match."""
    torch.manual_seed(4)
    branches = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), 0.1), branches.named_parameters())
    seen = []

    def hook(state, bucket):
        numbers = [next(i for i, b in enumerate(branches) if b.weight is p) for p in bucket.parameters()]
        seen.append((bucket.index(), numbers, bucket.is_last(), state))
        return hvd.allreduce_async(bucket.buffer())

    optimizer.register_comm_hook("state", hook, bucket_cap_mb=4 * 16 / 2**20)  # one weight fills it
    for _ in range(3):
        optimizer.zero_grad()
        rows = torch.ones(1, 4)
        for number in [2, 0, 3, 1] if hvd.rank() == 0 else [1, 2, 0]:
            rows = branches[number](rows)
        rows.sum().backward()
        optimizer.step()
    expected = [3, 2, 1, 0] + 2 * [1, 3, 0, 2]  # first from the end, then as rank 0 gets them
    assert seen == [(i % 4, [number], i % 4 == 3, "state") for i, number in enumerate(expected)]
    everyone = hvd.allgather(torch.cat([b.weight.grad.flatten() for b in branches])[None])
    assert torch.equal(everyone[0], everyone[1])


@as_ranks(2)
def test_dtypes_do_not_mix_in_a_bucket_and_frozen_parameters_stay_out():
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3)])
    layers[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), 0.1), layers.named_parameters())
    dtypes = []

    def hook(state, bucket):
        dtypes.append((bucket.buffer().dtype, len(bucket.parameters())))
        return hvd.allreduce_async(bucket.buffer())

    optimizer.register_comm_hook(None, hook)
    layers[1](layers[0](torch.ones(1, 3) * hvd.rank()).double()).sum().backward()
    assert dtypes == [(torch.float64, 2), (torch.float32, 2)]
    everyone = hvd.allgather(layers[0].weight.grad.flatten()[None])
    assert torch.equal(everyone[0], everyone[1]) and layers[2].weight.grad is None


@as_ranks(2)
def test_reentrant_checkpoints_and_a_hook():
    model, reference = Tied(True), Tied(None)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    optimizer.register_comm_hook(None, by_handle, bucket_cap_mb=0.0001)
    plain = torch.optim.SGD(reference.parameters(), 0.01)
    for step in range(3):
        for this, opt, rows in ((model, optimizer, batch(step)[1]), (reference, plain, batch(step)[0])):
            opt.zero_grad()
            this(rows).pow(2).mean().backward()
            opt.step()
    assert_same(model, reference)


@as_ranks(2)
def test_passes_that_accumulate_and_a_hook():
    worlds = pair()
    worlds[1].register_comm_hook(None, by_handle)
    for step in range(3):
        for model, optimizer, _ in zip(worlds[::2], worlds[1::2], range(2)):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, batch(10 * step + part)[optimizer is worlds[1]]).backward()
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_what_cannot_be():
    _, optimizer, _, _ = pair()
    with pytest.raises(TypeError, match="hook"):
        optimizer.register_comm_hook(None, 5)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        optimizer.register_comm_hook(None, by_handle, bucket_cap_mb=0)
    optimizer.register_comm_hook(None, by_handle)
    with pytest.raises(RuntimeError, match="once"):
        optimizer.register_comm_hook(None, by_handle)
    model = network()
    narrow = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match="compression"):
        narrow.register_comm_hook(None, by_handle)
    wrong = hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), 0.1))
    wrong.register_comm_hook(None, lambda state, bucket: bucket.buffer()[:2])
    with pytest.raises(ValueError, match="returned 2 elements for bucket 0"):
        wrong.step()


@as_ranks(1)
def test_one_rank_calls_no_hook():
    model, optimizer, _, _ = pair()
    optimizer.register_comm_hook(None, lambda state, bucket: pytest.fail("called"))
    loss_of(model, batch(0)[1]).backward()
    optimizer.step()
