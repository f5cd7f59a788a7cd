"""Optimizers of some ranks only, and Adasum, which combines the changes that local steps make."""

import contextlib

import pytest
from ranks import as_ranks
from test_torch_optimizer import MAKERS, assert_same, batch, loss_of, network, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


@contextlib.contextmanager
def sets(*ranks):
    """Process sets of these ranks, gone afterwards."""
    made = [hvd.add_process_set(each) for each in ranks]
    yield made
    for each in made:
        assert hvd.remove_process_set(each)


@pytest.mark.parametrize("op", ["average", "predivide", "weighted", "groups", "fp16", "hook"])
@as_ranks(3)
def test_members_average_among_themselves_and_others_stay_local(op):
    arguments = {
        "predivide": {"gradient_predivide_factor": 2.0},
        "weighted": {"op": hvd.WeightedAverage(2.0)},
        "groups": {"groups": 2},
        "fp16": {"compression": hvd.Compression.fp16},
    }.get(op, {})
    with sets([0, 2]) as (members,):
        model, reference = network(), network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), model.named_parameters(), process_set=members, **arguments
        )
        if op == "hook":
            optimizer.register_comm_hook(
                None, lambda state, bucket: hvd.allreduce_async(bucket.buffer(), process_set=members)
            )
        plain = MAKERS["sgd"](reference.parameters())
        for step in range(3):
            parts = batch(step)[0].split(4)
            of_all = torch.cat([parts[0], parts[2]]) if hvd.rank() != 1 else parts[1]
            for this, opt, rows in ((model, optimizer, parts[hvd.rank()]), (reference, plain, of_all)):
                opt.zero_grad()
                loss_of(this, rows).backward()
                torch.nn.utils.clip_grad_norm_(this.parameters(), 0.3)
                opt.step()
        if op == "fp16":
            for mine, theirs in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
        else:
            assert_same(model, reference)


@as_ranks(3)
def test_two_overlapping_sets_of_one_model():
    """Each half of the model has its own set; rank 0 belongs to both."""
    with sets([0, 1], [0, 2]) as both:
        model = network()
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model[i].parameters(), 0.1), model.named_parameters(), process_set=s
            )
            for i, s in zip((0, 2), both)
        ]
        reference = network()
        rows = batch(0)[0].split(4)
        gradients = [torch.autograd.grad(loss_of(reference, part), list(reference.parameters())) for part in rows]
        loss_of(model, rows[hvd.rank()]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for half, other in ((0, 1), (1, 2)):
            members = (0, other) if hvd.rank() in (0, other) else (hvd.rank(),)
            for index in (2 * half, 2 * half + 1):
                expected = sum(gradients[rank][index] for rank in members) / len(members)
                torch.testing.assert_close(list(model.parameters())[index].grad, expected)


def pairwise(deltas):
    """Adasum of the ranks' tensors: neighbours pairwise, level by level, an odd one carried up."""
    while len(deltas) > 1:
        combined = []
        for a, b in zip(deltas[::2], deltas[1::2]):
            dot, aa, bb = (x.flatten() @ y.flatten() for x, y in ((a, b), (a, a), (b, b)))
            combined.append((1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b)
        deltas = combined + deltas[2 * len(combined) :]
    return deltas[0]


@pytest.mark.parametrize("maker", ["sgd", "adam"])
@as_ranks(1, 2, 3)
def test_adasum_combines_the_changes_of_local_steps(maker):
    model, optimizer, _, _ = pair(MAKERS[maker], op=hvd.Adasum)
    replicas = [network() for _ in range(hvd.size())]
    steppers = [MAKERS[maker](replica.parameters()) for replica in replicas]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(step)[1]).backward()
        optimizer.step()
        starts = [p.detach().clone() for p in replicas[0].parameters()]
        for replica, stepper, part in zip(replicas, steppers, batch(step)[0].split(4)):
            stepper.zero_grad()
            loss_of(replica, part).backward()
            stepper.step()
        with torch.no_grad():
            for start, *parameters in zip(starts, *[replica.parameters() for replica in replicas]):
                change = pairwise([parameter - start for parameter in parameters])
                for parameter in parameters:
                    parameter.copy_(start + change)
    assert_same(model, replicas[0])


@as_ranks(2)
def test_adasum_skips_on_all_ranks_when_one_finds_an_infinity():
    model, optimizer, _, _ = pair(op=hvd.Adasum)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for poisoned in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if poisoned and hvd.rank() else 1.0
        scaler.scale(loss_of(model, batch(0)[1]) * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(*both) for both in zip(before, model.parameters())) == poisoned
    assert scaler.get_scale() == 2.0


@as_ranks(2)
def test_adasum_with_closures_compression_groups_added_later_and_what_it_has_not():
    model, extra = network(), network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum, compression=hvd.Compression.bf16,
        backward_passes_per_step=2,
    )  # fmt: skip
    optimizer.add_param_group({"params": list(extra.parameters())})

    def closure():
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss = loss_of(model, batch(0)[1]) + loss_of(extra, batch(0)[1])
            loss.backward()
        return loss

    assert optimizer.step(closure) > 0 and optimizer.backward_passes_per_step == 2
    optimizer.synchronize()
    states = hvd.allgather_object([p.detach() for this in (model, extra) for p in this.parameters()])
    assert all(torch.equal(*both) for both in zip(*states))
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported"), optimizer.skip_synchronize():
        pass
    with pytest.raises(ValueError, match="comm hook"):
        optimizer.register_comm_hook(None, print)
    with pytest.raises(ValueError, match="op=hvd.Average"):
        hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), op=hvd.Adasum, gradient_predivide_factor=2.0)


def averages(optimizer, model, step):
    """Whether the ranks of the optimizer's set have the same weights after a step on different rows."""
    optimizer.zero_grad()
    loss_of(model, batch(step)[0].split(4)[hvd.rank()]).backward()
    optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@as_ranks(3)
def test_an_optimizer_that_only_members_make_leaves_those_of_all_alone():
    with sets([0, 2]) as (members,):
        model = network()
        if members.included():
            small = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), process_set=members)
            mine = averages(small, model, 0)
            everyone = hvd.allgather(mine[None], process_set=members)
            assert torch.equal(everyone[0], everyone[1])
        for step in range(2):
            model = network()
            optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
            everyone = hvd.allgather(averages(optimizer, model, step)[None])
            assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[0], everyone[2])


@as_ranks(3)
def test_what_one_rank_could_not_wrap_counts_nowhere():
    if hvd.rank() == 1:
        for wrong in (
            {"groups": [[torch.zeros(2)]]}, {"groups": "two"}, {"named_parameters": [("a", torch.zeros(2))]}
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError)):
                hvd.DistributedOptimizer(MAKERS["sgd"](network().parameters()), **wrong)
        with pytest.raises(ValueError, match="complex"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], 0.1))
    for arguments in ({}, {"op": hvd.Adasum}):
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), **arguments)
        everyone = hvd.allgather(averages(optimizer, model, 0)[None])
        assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[0], everyone[2])


@as_ranks(2)
def test_a_new_life_begins_to_count_anew():
    """A rank that has lived before and one that has not: as after an elastic reset."""
    made = hvd.rank() + 1
    model = network()
    for _ in range(made):
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
    hvd.shutdown()
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
    everyone = hvd.allgather(averages(optimizer, model, 0)[None])
    assert torch.equal(everyone[0], everyone[1])
