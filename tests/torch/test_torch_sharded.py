"""`DistributedOptimizer(shard=True)`: the same bits as without it, in every form of a training loop."""

import copy
import hashlib

import pytest
import torch
from ranks import as_ranks, everything
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.torch.optimizer.sent_gradient import SentGradient

MAKE = {
    "sgd": lambda ps: optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda ps: optim.AdamW(ps, lr=1e-2),
    "adamw-fused": lambda ps: optim.AdamW(ps, lr=1e-2, fused=True),
    "amsgrad": lambda ps: optim.Adam(ps, lr=1e-2, amsgrad=True, foreach=False),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    "nadam": lambda ps: optim.NAdam(ps, lr=1e-2),
    "radam": lambda ps: optim.RAdam(ps, lr=1e-2),
    "adamax": lambda ps: optim.Adamax(ps, lr=1e-2),
    "adadelta": optim.Adadelta,
    "asgd": lambda ps: optim.ASGD(ps, lr=0.05),
    "rprop": lambda ps: optim.Rprop(ps, lr=1e-3),
    "adafactor": lambda ps: optim.Adafactor(ps, lr=1e-2),
}
OPTIMIZERS = ["momentum", "adamw", "adamw-fused", "adafactor"]
OPTIMIZERS += everything(*(name for name in MAKE if name not in OPTIMIZERS))
FORMS = ["plain", "groups", "scheduler", "frozen", "frozen-here", "late", "passes", "no_sync", "closure", "clip"]
FORMS += ["scaler", "scaler-fused", "sum", "predivide", "bf16", "in-place", "model", "data", "checkpointed", "gan"]
FORMS += ["channels-last", "skipped-pass", "failed-pass"]


def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def batch(step):
    data, target = batch.all = getattr(batch, "all", None) or digits()
    at = (torch.arange(16) + 16 * (step * hvd.size() + hvd.rank())) % len(data)
    return data[at], target[at]


def net(form="plain"):
    """A parameter of over 256 KB, which travels alone, and small ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 231), nn.Tanh(), nn.Linear(231, 10)]
    if form == "channels-last":
        layers = [nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last if form == "channels-last" else None)


def loss_of(model, step):
    data, target = batch(step)
    return nn.functional.cross_entropy(model(data), target)


def bits(tensors):
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state_bits(state):
    found = []
    for at, entries in sorted(state["state"].items()):
        for key, value in sorted(entries.items()):
            found.append((at, key, bits([value]) if isinstance(value, torch.Tensor) else value))
    return found, state["param_groups"]


def require_equal_on_all(*values):
    assert all(value == values[0] for value in values), values
    everyone = hvd.allgather_object(values[0])
    assert all(theirs == everyone[0] for theirs in everyone), everyone


@pytest.mark.parametrize("name", OPTIMIZERS)
@as_ranks(2, *everything(3, 4))
def test_values_and_state_have_the_bits_of_the_replicated_optimizer(name):
    values, states = [], []
    for shard in (False, True):
        model = net()
        optimizer = hvd.DistributedOptimizer(MAKE[name](model.parameters()), model.named_parameters(), shard=shard)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        values.append(bits(model.parameters()))
        states.append(optimizer.state_dict())
    require_equal_on_all(*values)
    assert (states[1] is None) == (hvd.rank() > 0)
    if hvd.rank() == 0:
        assert state_bits(states[0]) == state_bits(states[1])


@as_ranks(2, 3, *everything(4))
def test_a_rank_keeps_its_share_of_the_state():
    model = net()
    optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters()), model.named_parameters(), shard=True)
    loss_of(model, 0).backward()
    assert isinstance(model[0].weight.grad, SentGradient)
    optimizer.step()
    kept = sum(value.numel() for entries in optimizer._hvd_shards.inner.state.values() for value in entries.values())
    whole = 2 * sum(each.numel() for each in model.parameters())
    assert kept < whole / hvd.size() + 20, (kept, whole)
    assert not optimizer.state


def train(form, shard):
    """Ten steps of a loop in this form; the model, and norms and scales on the way."""
    model, words = net(form), {"shard": shard}
    words |= {"passes": {"backward_passes_per_step": 3}, "sum": {"op": hvd.Sum}}.get(form, {})
    words |= {"predivide": {"gradient_predivide_factor": 2.0}, "bf16": {"compression": hvd.Compression.bf16}}.get(
        form, {}
    )
    all_named = list(model.named_parameters())
    named = all_named[:-2] if form == "late" else all_named
    options = [each for _, each in named]
    if form in ("groups", "scheduler"):
        options = [{"params": options[:3], "lr": 1e-2}, {"params": options[3:], "lr": 3e-3, "weight_decay": 0.1}]
    optimizer = optim.AdamW(options, lr=1e-2, fused=form == "scaler-fused")
    optimizer = hvd.DistributedOptimizer(optimizer, named, **words)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20) if form == "scheduler" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if form.startswith("scaler") else None
    last, found = hvd.rank() == hvd.size() - 1, []

    def backward(step):
        loss = loss_of(model, step)
        if scaler is not None:
            loss = scaler.scale(loss * float("inf") if step == 6 and last else loss)
        loss.backward()
        return loss

    for step in range(10):
        change(form, model, optimizer, [each for _, each in all_named], step, last)
        model.zero_grad() if form == "model" else optimizer.zero_grad(set_to_none=form != "in-place")
        if form == "closure":
            optimizer.step(lambda step=step: backward(step))
            continue
        if form == "no_sync":
            with optimizer.no_sync():
                backward(100 + step)
        if form == "checkpointed":
            inner = torch.utils.checkpoint.checkpoint(model[:3], batch(step)[0].requires_grad_(), use_reentrant=True)
            nn.functional.cross_entropy(model[3:](inner), batch(step)[1]).backward()
        elif form == "failed-pass" and step == 4:
            hook = model[0].weight.register_hook(lambda _: 1 / 0) if last else None
            with pytest.raises(ZeroDivisionError if last else hvd.HvdMismatchError):
                backward(step)
            if hook is not None:
                hook.remove()
            continue
        elif not (form == "skipped-pass" and step % 4 == 3 and last):
            for each in range(3 if form == "passes" else 1):
                backward(step + 100 * each)
        if scaler is not None and form == "scaler":
            scaler.unscale_(optimizer)
        if form in ("clip", "scaler", "passes", "skipped-pass"):
            found.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
            found.append(scaler.get_scale())
        if scheduler is not None:
            scheduler.step()
        if form == "gan":
            backward(200 + step)
    return bits(model.parameters()), found


def change(form, model, optimizer, parameters, step, last):
    """What a form does to parameters between steps."""
    if form == "late" and step == 4:
        optimizer.add_param_group({"params": parameters[-2:], "lr": 5e-3})
    if form == "frozen" or (form == "frozen-here" and last):
        for each in parameters[2:4]:
            each.requires_grad_(not 3 <= step < 6)
    if form == "data" and step == 5:
        for each in parameters:
            each.data = each.data.clone()


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2, *everything(3))
def test_a_loop_has_the_bits_of_the_replicated_optimizer(form):
    require_equal_on_all(train(form, False), train(form, True))


@as_ranks(2)
def test_a_whole_state_is_loaded_in_each_way():
    model = net()
    optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), shard=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    saved = hvd.broadcast_object(optimizer.state_dict(), 0)
    weights, results = {key: value.clone() for key, value in model.state_dict().items()}, []
    for how in ("replicated", "before wrapping", "sharded", "into the original", "broadcast"):
        model = net()
        model.load_state_dict(weights)
        base, state = optim.AdamW(model.parameters(), lr=1e-2), copy.deepcopy(saved)
        if how == "before wrapping":
            base.load_state_dict(state)
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), shard=how != "replicated")
        if how in ("replicated", "sharded") or (how == "broadcast" and hvd.rank() == 0):
            optimizer.load_state_dict(state)
        if how == "into the original":
            base.load_state_dict(state)
        if how == "broadcast":
            hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        results.append(bits(model.parameters()))
    require_equal_on_all(*results)


@as_ranks(2)
def test_a_gradient_that_was_sent_is_not_read_in_silence():
    model = net()
    optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard=True)
    loss_of(model, 0).backward()
    for read in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(hvd.HvdError, match=r"'0.weight' is not on this rank.*clip_grad_norm_.*HVD200"):
            read(model.parameters(), 1.0)
    with pytest.raises(hvd.HvdError, match="HVD200"):
        model[0].weight.grad.norm()
    assert "each rank has its share" in repr(model[0].weight.grad)
    optimizer.step()


class GlobalNorm(optim.SGD):
    def step(self, closure=None):
        found = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = sum(float(each.grad.norm()) for each in found)
        for each in found:
            each.data.sub_(0.1 * each.grad / (1 + norm))


@as_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name():
    model = net()

    def wrap(optimizer, **words):
        return hvd.DistributedOptimizer(optimizer, shard=True, **words)

    two = nn.Linear(8, 8)
    other = nn.Linear(8, 8)
    other.weight.data = two.weight.data
    plain = optim.SGD(model.parameters(), lr=0.1)
    for optimizer, words, text in (
        (optim.LBFGS(model.parameters()), {}, "LBFGS"),
        (optim.SparseAdam(model.parameters()), {}, "SparseAdam cannot be sharded"),
        (GlobalNorm(model.parameters(), lr=0.1), {}, "GlobalNorm cannot be sharded.*depends on the others"),
        (optim.SGD([two.weight, other.weight], lr=0.1), {}, "'noname.0.0' and 'noname.0.1' share memory"),
        (plain, {"op": hvd.Max}, "op must be"),
        (plain, {"op": hvd.Adasum}, "op must be"),
        (plain, {"op": hvd.WeightedAverage(1.0)}, "op must be"),
        (plain, {"groups": 2}, "groups"),
        (plain, {"bucket_cap_mb": 0}, "bucket_cap_mb"),
    ):
        with pytest.raises(ValueError, match=text + ".*HVD200"):
            wrap(optimizer, **words)
    optimizer = wrap(plain)
    with pytest.raises(hvd.HvdStateError, match="save_sharded.*HVD425"):
        hvd.elastic.TorchState(model, optimizer).save_to("nowhere")
    for call, text in (
        (lambda: optimizer.register_comm_hook(None, print), "no comm hook"),
        (lambda: optimizer.clip_grad_norm_(1.0, 3), "norm_type"),
        (lambda: hvd.uneven_inputs(optimizer).__enter__(), "shard=True"),
        (lambda: optimizer.load_state_dict(None), "rank 0"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    loss_of(model, 0).backward()
    optimizer.step()
    model.double()
    with pytest.raises(hvd.HvdError, match="HVD200"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()


@as_ranks(2)
def test_sparse_gradients_travel_dense_or_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), shard=True)
    with pytest.raises(ValueError, match="'weight' is sparse.*sparse_as_dense"):
        model(torch.tensor([1, 2])).sum().backward()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=True, shard=True)
    before = model.weight.detach().clone()
    model.zero_grad()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (before - model.weight).sum(1).tolist() == pytest.approx([0, 4, 4, *[0] * 7], abs=1e-5)


@as_ranks(2, *everything(3))
def test_a_rank_in_another_part_of_its_loop_is_an_error_and_no_hang():
    last = hvd.rank() == hvd.size() - 1
    for part in ("missed step", "state_dict on one rank"):
        model = net()
        optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters()), model.named_parameters(), shard=True)
        loss_of(model, 0).backward()
        with pytest.raises(hvd.HvdMismatchError, match=r"all ranks (of a sharded optimizer )?must.*\[HVD310\]$"):
            if part == "missed step" and not last:
                optimizer.step()
            elif part == "missed step":
                optimizer.zero_grad()
                loss_of(model, 1).backward()
            else:
                optimizer.step()
                optimizer.zero_grad()
                optimizer.state_dict() if last else loss_of(model, 1).backward()


@as_ranks(2)
def test_ranks_with_other_parameters_are_refused():
    model = nn.Linear(4, 2 + hvd.rank())
    with pytest.raises(hvd.HvdMismatchError, match="HVD301"):
        hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard=True)


@as_ranks(4)
def test_a_process_set_shards_among_its_ranks():
    members = hvd.add_process_set([1, 3])
    model = net()
    values = []
    for shard in (False, True):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=members, shard=shard)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        values.append(bits(model.parameters()))
    assert values[0] == values[1]
    assert (optimizer.state_dict() is None) == (hvd.rank() == 3)
    hvd.remove_process_set(members)
