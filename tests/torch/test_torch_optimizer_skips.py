"""A rank whose backward pass has ended with an exception, which the script catches, says so: the other ranks hear which
rank has skipped what, nobody waits, and training goes on with equal weights."""

import contextlib

import pytest
from ranks import as_ranks, everything

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


class Boom(RuntimeError):
    """What the user's code raises."""


def fail(_):
    raise Boom


class Skipping:
    """A model whose first parameter, the last that backward comes to, or that of another layer, fails on rank 1 when
    it is told to."""

    def __init__(self, optimizers=1, layers=4, fails_at=0, **arguments):
        self.fails_at, self.passes = fails_at, arguments.get("backward_passes_per_step", 1)
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(layers)])
        named = list(self.model.named_parameters())
        part = len(named) // optimizers
        self.optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in some], lr=0.01), some, **arguments)
            for some in (named[i * part : (i + 1) * part] for i in range(optimizers))
        ]
        self.scale, self.heard = (lambda loss: loss), []

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def backward(self, number, fails=False):
        generator = torch.Generator().manual_seed(100 * number + hvd.rank())
        fails = fails and hvd.rank() == 1
        hook = self.model[self.fails_at].weight.register_hook(fail) if fails else None
        try:
            self.scale(self.model(torch.randn(4, 16, generator=generator)).pow(2).mean()).backward()
        finally:
            if hook is not None:
                hook.remove()

    def train(self, steps, failing=(), fails_in_forward=None, steps_then=False):
        """The loop of a script that skips a batch when anything goes wrong."""
        for number in steps:
            self.zero_grad()
            try:
                if number == fails_in_forward and hvd.rank() == 1:
                    raise Boom
                for part in range(self.passes):
                    self.backward(10 * number + part, number in failing and part == self.passes - 1)
                self.step()
            except RuntimeError as error:
                self.heard.append(error)
                self.zero_grad()
                if steps_then:
                    self.step()

    def check(self, times):
        """All ranks were told, and are equal."""
        assert len(self.heard) == times, self.heard
        for error in self.heard:
            if hvd.rank() == 1:
                assert isinstance(error, Boom)
            else:
                assert isinstance(error, hvd.HvdMismatchError) and error.code == "HVD308"
                assert str(error).startswith("rank 1 skipped") and "zero_grad()" in str(error), error
        mine = torch.cat([each.detach().flatten() for each in self.model.parameters()])
        everyone = hvd.allgather(mine[None])
        assert all(torch.equal(everyone[0], each) for each in everyone)


FORMS = {
    "plain": {},
    "groups": {"groups": 3},
    "fp16": {"compression": hvd.Compression.fp16},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "weighted": {"op": hvd.WeightedAverage(2.0)},
    "two optimizers": {"optimizers": 2},
    "two optimizers, of which the pass reaches one": {"optimizers": 2, "fails_at": 2},
    "two passes": {"backward_passes_per_step": 2},
}


@pytest.mark.parametrize("form", FORMS)
@as_ranks(3, *everything(2))
def test_a_batch_that_one_rank_skips_is_skipped_by_all_and_told(form):
    world = Skipping(**FORMS[form])
    world.train(range(8), (1, 3, 4) if world.fails_at else (0, 3, 4))  # one batch tells what is reached together
    world.check(3)


@as_ranks(2)
def test_gradients_that_had_not_been_sent_yet_or_are_waited_for_in_step():
    for layers in (1, 4):
        world = Skipping(layers=layers)
        world.optimizers[0].wait_in_backward = layers == 1
        world.backward(0)
        world.train(range(1, 5), failing=(2,))
        world.check(1)


@as_ranks(2)
def test_sparse_gradients():
    world = Skipping(layers=2)
    embedding = torch.nn.Embedding(8, 16, sparse=True)
    named = [(f"sparse.{name}", p) for name, p in (*embedding.named_parameters(), *world.model.named_parameters())]
    world.optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.01), named)]
    hvd.broadcast_parameters(named, 0)
    world.scale, world.heard = (lambda loss: loss + embedding(torch.tensor([1, 2])).sum()), []
    world.train(range(8), failing=(3, 5))
    world.check(2)
    everyone = hvd.allgather(embedding.weight.detach()[None])
    assert torch.equal(everyone[0], everyone[1])


@as_ranks(2)
def test_with_autocast_and_a_grad_scaler():
    world = Skipping()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = world.optimizers[0]
    world.scale = scaler.scale

    def step():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    world.step = step
    with torch.autocast("cpu", dtype=torch.bfloat16):
        world.train(range(6), failing=(1, 3))
    world.check(2)


@as_ranks(2)
def test_a_pass_that_fails_within_no_sync_or_before_the_last_of_a_window_is_only_dropped():
    for passes in (1, 2):
        world = Skipping(backward_passes_per_step=passes)
        inside = world.optimizers[0].no_sync() if passes == 1 else contextlib.nullcontext()
        with inside, contextlib.suppress(Boom):
            world.backward(0, fails=True)
        world.backward(1)
        world.step()
        world.check(0)


@as_ranks(2)
def test_going_on_to_step_is_an_error_that_says_what_to_do():
    world = Skipping()
    world.train(range(2))
    for later in (False, True):
        world.optimizers[0].wait_in_backward = not later
        with pytest.raises((Boom, hvd.HvdMismatchError)):
            world.backward(5, fails=True)
            world.step()
        if hvd.rank() == 1:
            with pytest.raises(hvd.HvdError, match=r"rank 1 .*'0.weight[#0-9]*'.*zero_grad\(\).*HVD308"):
                world.step()
        for call in (world.step, world.optimizers[0].synchronize, world.step):
            with pytest.raises(hvd.HvdError, match=rf"rank {hvd.rank()} has no averages.*zero_grad\(\).*HVD308"):
                call()
        world.backward(6)  # adds to what a skip has left
        with pytest.raises(hvd.HvdError, match="HVD308"):
            world.step()
        world.zero_grad()
        world.train(range(6, 8))
        with pytest.raises((Boom, hvd.HvdMismatchError)):
            world.backward(9, fails=True)
            world.step()
        world.model.zero_grad(set_to_none=later)
        world.backward(10)
        world.step()
        world.check(0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@pytest.mark.parametrize("form", [*FORMS, "adasum"])
@as_ranks(2)
def test_zero_grad_and_step_where_the_exception_is_caught_take_no_step_on_any_rank(form):
    """And a forward that fails on one rank is answered by the same two calls: there they give zeros."""
    world = Skipping(**FORMS.get(form, {"op": hvd.Adasum}))
    for optimizer in world.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.9
    steps = [0]
    world.optimizers[0].register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    skipped = [2, 4] if world.fails_at else [0, 2, 4]
    world.train(range(6), skipped, fails_in_forward=3, steps_then=True)
    assert form == "adasum" or steps == [6 - len(skipped)]
    world.check(len(skipped) + hvd.rank() if form != "adasum" else (3 + 1) * hvd.rank())


@as_ranks(2)
def test_a_comm_hook_cannot_be_skipped_and_the_rank_is_told():
    optimizer = Skipping().optimizers[0]
    optimizer.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(hvd.HvdError, match="comm hook.*HVD308"):
        optimizer._hvd.carrier.skip([0])
