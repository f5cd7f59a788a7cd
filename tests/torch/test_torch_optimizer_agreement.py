"""What only some ranks send in a round: zeros stand for it elsewhere, or all ranks have an error in that step."""

import warnings

import numpy as np
import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

FORMS = {
    "plain": {},
    "two passes": {"backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "weighted": {"op": hvd.WeightedAverage(1.0)},
    "sum": {"op": hvd.Sum},
    "groups": {"groups": 1},
}


class World:
    """Three weights of a linear loss: the gradient of each is the step's number plus the rank."""

    def __init__(self, later=(), wait=True, momentum=0.0, **form):
        self.weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"}
        for name in later:
            self.weights[name].requires_grad_(False)
        plain = torch.optim.SGD(self.weights.values(), 1.0, momentum=momentum, weight_decay=momentum)
        self.optimizer = hvd.DistributedOptimizer(plain, self.weights.items(), **form)
        self.optimizer.wait_in_backward = wait

    def step(self, number, frozen=""):
        """What the weights have moved by."""
        before = {name: each.detach().clone() for name, each in self.weights.items()}
        for name, each in self.weights.items():
            each.requires_grad_(name not in frozen)
        self.optimizer.zero_grad()
        for _ in range(self.optimizer.backward_passes_per_step):
            trained = [each.sum() for each in self.weights.values() if each.requires_grad]
            if trained:
                (sum(trained) * float(number + hvd.rank())).backward()
        self.optimizer.step()
        return {name: float((before[name] - each)[0]) for name, each in self.weights.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wait", [True, False])
@as_ranks(2, 3)
def test_a_rank_that_froze_a_parameter_sends_zeros_while_another_trains_it(form, wait):
    world, random = World(wait=wait, **FORMS[form]), np.random.default_rng(3)
    passes, ranks = world.optimizer.backward_passes_per_step, range(hvd.size())
    for number in range(1, 9):
        frozen = ["".join(name for name in "abc" if random.random() < 0.5) for _ in ranks]
        moved = world.step(number, frozen[hvd.rank()])
        for name in "abc":
            total = passes * sum(number + rank for rank in ranks if name not in frozen[rank])
            assert moved[name] == pytest.approx(total if form == "sum" else total / hvd.size(), rel=1e-3), (
                number,
                name,
            )
    hvd.check_consistency(world.weights)


@as_ranks(2)
def test_what_is_frozen_everywhere_has_no_gradient_and_what_one_rank_thaws_is_averaged():
    world = World(later="c", momentum=0.5)
    for number in range(1, 4):
        world.step(number, frozen="c" if number < 3 else "bc")
    weights = world.weights
    assert weights["c"].grad is None and weights["b"].grad is None
    assert world.step(4, frozen="bc")["b"] == 0.0  # neither momentum nor weight decay
    assert world.step(1, frozen="" if hvd.rank() == 1 else "c")["c"] == 1.0
    hvd.check_consistency(weights)


@pytest.mark.parametrize("mend", ["the rank", "the others"])
@as_ranks(2)
def test_a_parameter_that_one_rank_added_is_an_error_on_all_in_that_step(mend):
    world = World()
    world.step(1)
    own = torch.nn.Parameter(torch.zeros(2))
    if hvd.rank() == 1:
        world.optimizer.add_param_group({"params": [own]})
    for _ in range(2):
        with pytest.raises(hvd.HvdMismatchError, match="rank 1 has 'noname.1.0#added.*add_param_group.*HVD301"):
            world.optimizer.zero_grad()
            (sum(each.sum() for each in world.weights.values()) + own.sum()).backward()
        world.optimizer.zero_grad()
    assert world.weights["a"].tolist() == [-1.5] * 2
    if hvd.rank() == 0 and mend == "the others":
        world.optimizer.add_param_group({"params": [own]})
    elif mend == "the rank":
        own.requires_grad_(False)
    world.step(2)
    (own.sum() * (1 + hvd.rank()) if own.requires_grad else world.weights["a"].sum()).backward()
    assert mend == "the rank" or own.grad.tolist() == [1.5] * 2


@as_ranks(2)
def test_a_comm_hook_and_a_failed_pass_beside_a_frozen_parameter():
    only = "b" if hvd.rank() else ""
    for world in World(groups=2), World():
        fails = world.weights["a"].register_hook(lambda _: 1 / 0) if hvd.rank() else None
        with pytest.raises((hvd.HvdMismatchError, ZeroDivisionError), match="HVD308|zero"):
            world.step(1, frozen=only)
        if fails is not None:
            fails.remove()
        assert world.step(1, frozen=only) == {"a": 1.5, "b": 0.5, "c": 1.5}
    world.optimizer.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer()))
    assert world.step(1) == {"a": 1.5, "b": 1.5, "c": 1.5}
    with pytest.raises(hvd.HvdMismatchError, match="comm hook.*HVD301|disagree"):
        world.step(2, frozen=only)


def said(call, code):
    """How often a call warns with this code, on all ranks."""
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        call()
    return int(hvd.allreduce(torch.tensor([sum(code in str(each.message) for each in every)]), op=hvd.Sum))


@pytest.mark.parametrize("form", [*FORMS, "adasum"])
@pytest.mark.parametrize("own", ["", "zeros", "overflow", "first step", "second step"])
@as_ranks(1, 3)
def test_a_forgotten_shard_is_one_warning(own, form):
    """Unless gradients are zero, or unlike those of other ranks in one of the first two steps."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 0.1), **{"adasum": {"op": hvd.Adasum}, **FORMS}[form])

    def train():
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(optimizer.backward_passes_per_step):
                mine = hvd.rank() if (own, step) in (("first step", 0), ("second step", 1)) else 0.0
                scale = {"zeros": 0.0, "overflow": 1.0 if step else float("inf")}.get(own, 1.0)
                mine += hvd.rank() * (own == "overflow")
                ((weights[0].sum() + 2 * weights[1].sum()) * (scale * (1.0 + step + mine))).backward()
            optimizer.step()

    assert said(train, "HVD241") == (not own and hvd.size() > 1)
