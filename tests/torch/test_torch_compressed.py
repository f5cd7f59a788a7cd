"""Gradients in 8 and 4 bits (hvdlite/torch/compressed), beside what else an optimizer does."""

import hashlib

import pytest
import torch
from pretended_hosts import pretend
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite.errors import HvdError, HvdMismatchError

FRESH_RANKS = True
INT8 = hvd.Compression.int8(least_bytes=1024, bucket_mb=0.01)
INT4 = hvd.Compression.int4(least_bytes=1024, bucket_mb=0.01)


def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 30), torch.nn.Linear(30, 4)
    )


def wrapped(model, compression=INT8, rate=0.05, **options):
    plain = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression, **options)


def backward(model, step, *more):
    chance = torch.Generator().manual_seed(100 * step + hvd.rank())
    loss = model(torch.randn(16, 40, generator=chance)).square().mean()
    sum([each.square().sum() * 0.01 for each in more], loss).backward()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def bits(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def same_everywhere(model):
    every = hvd.allgather_object(bits(model))
    assert len(set(every)) == 1, every


def buckets(optimizer):
    return sum(optimizer._hvd.carrier.counts.values())


def distance(model, other):
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), other.parameters())]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5


@as_ranks(2, 3, 4)
@pytest.mark.parametrize("layout", [(1,), (2,), (1, 3)], ids=str)
def test_training_comes_close_to_float32_with_the_same_bits_on_all_ranks(layout):
    if sum(layout) not in (1, hvd.size()) and (len(layout) > 1 or hvd.size() % layout[0]):
        return
    pretend(*layout)
    found = {}
    for name, compression in (("none", hvd.Compression.none), ("int8", INT8), ("int4", INT4)):
        model = found[name] = network()
        optimizer = wrapped(model, compression)
        train(model, optimizer, 30)
        same_everywhere(model)
        several_hosts = layout != (2,) or hvd.size() > 2
        assert name == "none" or buckets(optimizer) == (29 * 2 if several_hosts else 0)
    if several_hosts:
        assert 0 < distance(found["int8"], found["none"]) < 1e-3
        assert distance(found["int8"], found["none"]) < distance(found["int4"], found["none"]) < 2e-2
    else:
        assert bits(found["int8"]) == bits(found["none"])


@as_ranks(2, 4)
def test_nothing_is_lost_but_kept_as_residuals():
    pretend(hvd.size() // 2)
    model = network()
    optimizer = wrapped(model, INT4, rate=0.0)
    given, sent = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()], None
    sent = [torch.zeros_like(each) for each in given]
    for step in range(20):
        optimizer.zero_grad()
        with torch.enable_grad():
            for p in model.parameters():
                p.grad = None
            mine = network()
            backward(mine, step)
        backward(model, step)
        for at, (p, q) in enumerate(zip(model.parameters(), mine.parameters())):
            given[at] += q.grad
            sent[at] += hvd.size() * p.grad
    kept = optimizer.state_dict()["hvdlite"]["residuals"]
    assert set(kept) == {"0.weight", "2.weight"}
    for at, (name, p) in enumerate(model.named_parameters()):
        left = kept[name].view(p.shape).double() if name in kept else torch.zeros_like(p).double()
        total = hvd.allreduce(given[at] - left, op=hvd.Sum, name=f"total {name}")
        size = hvd.allreduce(given[at].abs(), op=hvd.Sum, name=f"size {name}")
        assert float((total - sent[at]).abs().max()) < 1e-5 * float(size.max()), name


@as_ranks(2, 4)
def test_a_backward_that_fails_on_one_rank_ends_the_step_for_all():
    pretend(hvd.size() // 2)
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 3)
    last = hvd.size() - 1
    handle = model[0].weight.register_hook(lambda _: 1 / 0)  # the bucket of the last layers has gone by then
    if hvd.rank() != last:
        handle.remove()
    with pytest.raises(ZeroDivisionError if hvd.rank() == last else HvdMismatchError) as caught:
        backward(model, 3)
    assert hvd.rank() == last or "HVD308" in str(caught.value)
    handle.remove()
    train(model, optimizer, 3, 4)
    same_everywhere(model)


@as_ranks(2, 4)
def test_a_rank_that_leaves_out_a_step_is_named():
    pretend(hvd.size() // 2)
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    backward(model, 3)
    if hvd.rank() != hvd.size() - 1:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(HvdError, match="HVD309"):
        backward(model, 4)


@as_ranks(2, 4)
def test_frozen_and_late_parameters():
    pretend(hvd.size() // 2)
    model, exact = network(), network()
    optimizer, plain = wrapped(model), wrapped(exact, hvd.Compression.none)
    extra, more = (torch.nn.Parameter(torch.ones(30, 30)) for _ in range(2))
    for step in range(12):
        for net, opt, late in ((model, optimizer, extra), (exact, plain, more)):
            net[0].weight.requires_grad = step not in (3, 4) or (step == 4 and hvd.rank() == 0)
            net[2].weight.requires_grad = step < 7
            if step == 5:
                opt.add_param_group({"params": [late]})
            opt.zero_grad()
            backward(net, step, *([late] if step > 5 and hvd.rank() == 0 else []))
            opt.step()
    same_everywhere(model)
    same_everywhere(torch.nn.ParameterList([extra]))
    assert distance(model, exact) < 1e-3
    assert float((extra - more).abs().max()) < 1e-2
    frozen = optimizer._hvd.wire.names.index("2.weight")
    assert frozen not in optimizer._hvd.carrier.bucket_of  # and is not sent any more


@as_ranks(2)
def test_accumulation_clipping_and_weights():
    pretend(1)
    for options in ({"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"op": hvd.WeightedAverage(hvd.rank() + 1.0)},
                    {"gradient_predivide_factor": 2.0}, {"groups": 2}):  # fmt: skip
        model, exact = network(), network()
        for net, opt in (
            (model, wrapped(model, INT8, **options)),
            (exact, wrapped(exact, hvd.Compression.none, **options)),
        ):
            for step in range(0, 12, 2):
                opt.zero_grad()
                for part in (0, 1) if "backward_passes_per_step" in options else (0,):
                    backward(net, step + part)
                opt.synchronize()
                opt.clip_grad_norm_(1.0)
                with opt.skip_synchronize():
                    opt.step()
        same_everywhere(model)
        assert 0 < distance(model, exact) < 2e-3, options
    model = network()
    optimizer = wrapped(model)
    with hvd.uneven_inputs(optimizer):
        train(model, optimizer, 4 + hvd.rank())
    same_everywhere(model)


@as_ranks(3)
def test_a_process_set_and_16_bits():
    pretend(1)
    some = hvd.add_process_set([0, 2])
    if some.included():
        model = network().to(torch.bfloat16)
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=INT8, process_set=some)
        for step in range(5):
            optimizer.zero_grad()
            chance = torch.Generator().manual_seed(step + hvd.rank())
            model(torch.randn(16, 40, generator=chance).bfloat16()).square().mean().backward()
            optimizer.step()
        assert model[0].weight.grad.dtype == torch.bfloat16 and buckets(optimizer) == 8
        total = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])
        assert torch.equal(hvd.broadcast(total, 2, process_set=some), total)
    hvd.remove_process_set(some)


@as_ranks(2)
def test_a_state_goes_on_where_it_was_saved():
    pretend(1)
    model = network()
    optimizer = wrapped(model, INT4)
    train(model, optimizer, 5)
    saved, weights = optimizer.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    train(model, optimizer, 5, 5)
    again = network(2)
    again.load_state_dict(weights)
    second = wrapped(again, INT4)
    second.load_state_dict(saved)
    second._hvd.wire.agreement.counted = 0  # a new job's first round would travel as it is; so does this one
    torch.optim.SGD(network().parameters(), lr=0.1).load_state_dict(saved)  # a plain one ignores the key
    kept = second.state_dict()["hvdlite"]["residuals"]
    assert all(torch.equal(kept[name], saved["hvdlite"]["residuals"][name]) for name in kept) and len(kept) == 2
    with pytest.warns(UserWarning, match="begins with zeros"):
        second.load_state_dict({**saved, "hvdlite": {**saved["hvdlite"], "size": 7}})
    assert not second.state_dict()["hvdlite"]["residuals"]
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.check_consistency(model, optimizer)
    train(model, optimizer, 2, 10)
    before = {name: each.clone() for name, each in optimizer.state_dict()["hvdlite"]["residuals"].items()}
    optimizer.collect_residuals(1)
    after = optimizer.state_dict()["hvdlite"]["residuals"]
    for name in before:
        total = hvd.allreduce(before[name], op=hvd.Sum, name=f"collected {name}")
        assert torch.equal(after[name], total if hvd.rank() == 1 else torch.zeros_like(total))
    train(model, optimizer, 2, 12)
    same_everywhere(model)


@as_ranks(2)
def test_residuals_follow_a_grad_scaler():
    pretend(1)
    found = []
    for scales in ((8.0, 8.0, 8.0, 8.0, 8.0), (8.0, 4.0, 16.0, 2.0, 2.0)):
        model = network()
        optimizer, scaler = wrapped(model, INT4), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step, scale in enumerate(scales):
            optimizer.zero_grad()
            chance = torch.Generator().manual_seed(step + hvd.rank())
            scaler.scale(model(torch.randn(16, 40, generator=chance)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(scale)
        same_everywhere(model)
        found.append(model)
    assert bits(found[0]) == bits(found[1])  # powers of two change no bit


@as_ranks(2)
def test_ranks_with_other_settings_and_what_is_refused():
    pretend(1)
    for mine in (INT4, hvd.Compression.none):
        model = network()
        optimizer = wrapped(model, mine if hvd.rank() else INT8)
        with pytest.raises(HvdMismatchError, match="Compression.int8") as caught:
            train(model, optimizer, 2)
        assert mine is hvd.Compression.none or "Compression.int4" in str(caught.value)
    model = network()
    for options in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"shard": True}):
        with pytest.raises(ValueError, match="HVD2"):
            wrapped(model, INT8, **options)
    with pytest.raises(ValueError, match="HVD227"):
        wrapped(model).register_comm_hook(None, lambda state, bucket: bucket.buffer())
    for name, wrong in (("bits", {"bits": 5}), ("least_bytes", {"bits": 8, "least_bytes": -1})):
        with pytest.raises(ValueError, match=name):
            type(INT8)(**wrong)


@as_ranks(4)
def test_several_rounds_a_step_where_one_host_has_one_rank():
    pretend(1, 3)
    model = network()
    optimizer = wrapped(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        backward(model, step + 100)
        optimizer.step()
    same_everywhere(model)


@as_ranks(2)
def test_a_damaged_state_is_dropped_with_a_warning():
    pretend(1)
    optimizer = wrapped(network(), hvd.PowerSGD(1, start_after=0))
    good = optimizer.state_dict()
    kept = good["hvdlite"]
    wide = torch.zeros(1).expand(1 << 40)
    wrong = [3, {}, {**kept, "rank": torch.ones(2)}, {**kept, "shared": {"rounds": "x", "q": {}}}]
    wrong += [
        {**kept, "residuals": {"0.weight": each}} for each in (wide, torch.ones(2), torch.full((2560,), float("nan")))
    ]
    wrong += [{**kept, "shared": {"rounds": 1, "q": {"0.weight": each}}} for each in (torch.ones(40, 1).double(), 3)]
    for each in wrong:
        with pytest.warns(UserWarning, match="HVD428"):
            optimizer.load_state_dict({**good, "hvdlite": each})
    optimizer.load_state_dict(good)
