"""An exception of the script between backward and step, on one rank, is caught there: that rank misses a step. All
ranks hear of it in the next round, and nobody does in programs whose ranks leave steps out together."""

import pytest
from ranks import as_ranks, everything

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


class World:
    """A model that is trained on batches which differ between ranks. `sparse`: its first parameter is."""

    def __init__(self, sparse=False, later=False, frozen=False, **arguments):
        torch.manual_seed(5)
        layers = [torch.nn.Linear(8, 8) for _ in range(3)]
        self.table = torch.nn.Embedding(6, 8, sparse=True) if sparse else None
        self.model = torch.nn.ModuleList([self.table, *layers] if sparse else layers)
        if frozen:
            layers[0].weight.requires_grad_(False)
        self.passes = arguments.get("backward_passes_per_step", 1)
        sgd = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.0 if sparse else 0.5)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), **arguments)
        self.optimizer.wait_in_backward = not later
        self.number = 0

    def backward(self, factor=1.0):
        for _ in range(self.passes):
            self.number += 1
            generator = torch.Generator().manual_seed(10 * self.number + hvd.rank())
            out = torch.randn(4, 8, generator=generator)
            if self.table is not None:
                out = out + self.table(torch.tensor([0, 1, 2, hvd.rank()]))
            for layer in self.model:
                out = layer(out) if layer is not self.table else out
            (out.pow(2).mean() * factor).backward()
        self.optimizer.synchronize()

    def batch(self):
        self.optimizer.zero_grad()
        self.backward()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def check(self, equal=True):
        mine = torch.cat([each.detach().flatten() for each in self.model.parameters()])
        everyone = hvd.allgather(mine[None], name="weights")
        assert all(torch.equal(everyone[0], each) for each in everyone) == equal


FORMS = {
    "plain": {},
    "groups": {"groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "fp16 in groups": {"compression": hvd.Compression.fp16, "groups": 2},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "weighted": {"op": hvd.WeightedAverage(2.0)},
    "two passes": {"backward_passes_per_step": 2},
    "waiting in step": {"later": True},
    "sparse": {"sparse": True},
    "sparse as dense": {"sparse": True, "sparse_as_dense": True},
    "the first one frozen": {"frozen": True},
}
DROPS = (
    lambda world: world.optimizer.zero_grad(),
    lambda world: world.model.zero_grad(),
    lambda world: world.optimizer.zero_grad(set_to_none=False),
    lambda world: [setattr(each, "grad", None) for each in world.model.parameters()],
)


@pytest.mark.parametrize("form", FORMS)
@as_ranks(3, *everything(2))
def test_a_rank_that_misses_a_step_is_told_on_all_ranks(form):
    world = World(**FORMS[form])
    for number, drop in enumerate(DROPS):
        for _ in range(3):
            world.batch()
        world.optimizer.zero_grad()
        world.backward()
        if hvd.rank() != 1:
            world.optimizer.step()
        for _ in range(2):  # it lasts
            drop(world)
            with pytest.raises(hvd.HvdMismatchError, match=r"^rank 1 did not take the step.*HVD309"):
                world.backward()
            with pytest.raises(hvd.HvdMismatchError, match="HVD309"):
                world.optimizer.step()
        world.check(equal=False)
        world.optimizer.zero_grad()
        if number % 2:
            hvd.broadcast_parameters(world.model.state_dict(), 0)
        else:
            state = hvd.broadcast_object((world.model.state_dict(), world.optimizer.state_dict()), 0)
            world.model.load_state_dict(state[0])
            world.optimizer.load_state_dict(state[1])
        hvd.broadcast_optimizer_state(world.optimizer, 0)
        world.batch()
        world.check()


@as_ranks(2)
def test_a_rank_that_alone_takes_a_step_is_told_too():
    world = World()
    world.batch()
    world.optimizer.zero_grad()
    world.backward()
    if hvd.rank() == 1:
        world.optimizer.step()
    world.optimizer.zero_grad()
    with pytest.raises(hvd.HvdMismatchError, match="^rank 0 did not take the step.*HVD309"):
        world.backward()


@as_ranks(3)
def test_within_a_process_set():
    some = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        world = World(process_set=some)
        world.batch()
        world.backward()
        if hvd.rank() == 0:
            world.optimizer.step()
        world.optimizer.zero_grad()
        with pytest.raises(hvd.HvdMismatchError, match="^rank 2 did not take the step.*HVD309"):
            world.backward()
    hvd.remove_process_set(some)


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2)
def test_steps_that_all_ranks_leave_out_are_nobodys_concern(form):
    world = World(**FORMS[form])
    world.optimizer.param_groups[0]["momentum"] = 0.0
    for number in range(3):
        world.batch()
        world.optimizer.zero_grad()
        world.backward()  # a loss that is no number, on all ranks; another optimizer's pass
        world.batch()
        world.model.zero_grad()
        for _ in range(3):  # several rounds add up
            world.backward()
        if hvd.rank() == number % 2:
            world.optimizer.step()
        else:
            world.optimizer.synchronize()
            with world.optimizer.skip_synchronize():
                world.optimizer.step()
        world.check()
        world.batch()
        world.optimizer.zero_grad()
        if number % 2 == hvd.rank():
            world.backward()
        world.optimizer.step()  # who has skipped backward
        world.check()
        world.optimizer.zero_grad()
        world.backward()
        torch.optim.SGD.step(world.optimizer)
        world.batch()
        world.check()
        world.backward()
        if hvd.rank() == 0:  # steps for all
            world.optimizer.step()
        hvd.broadcast_parameters(world.model.state_dict(), 0)
        world.batch()
        world.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        world.backward()
        world.optimizer.zero_grad()
        world.batch()
        world.check()
