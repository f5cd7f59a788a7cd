"""A signal handler raises in `backward` or `step`, and the script goes on: either the step is made up for, or somebody
hears of it. Weights never part in silence, and what a handler raises comes out at once, whatever it is."""

import os
import signal
import sys

import pytest
from pretended_hosts import pretend
from ranks import as_ranks, everything
from test_interrupted import ERRORS, EVERY, Raises, raised_in_wait, tell

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

KINDS = (*ERRORS, ValueError, MemoryError)


class World:
    """A model that is trained on batches which differ between ranks."""

    def __init__(self, **arguments):
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        sgd = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.5)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), **arguments)
        self.number = 0

    def backward(self):
        self.number += 1
        generator = torch.Generator().manual_seed(10 * self.number + hvd.rank())
        self.model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()

    def batch(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def check(self):
        mine = torch.cat([each.detach().flatten() for each in self.model.parameters()])
        everyone = hvd.allgather(mine[None], name="weights")
        assert all(torch.equal(everyone[0], each) for each in everyone)


@pytest.mark.parametrize("later", [False, True])
@as_ranks(2)
def test_what_was_interrupted_while_others_step_is_made_up_for_by_step_and_not_dropped(later):
    world = World()
    world.optimizer.wait_in_backward = not later
    world.batch()
    for kind in KINDS:
        if hvd.rank() == 1:
            tell(0)
            world.batch()
        else:
            with pytest.raises(kind, match="mine"):
                raised_in_wait(world.batch, kind("mine"))
            tell(0)  # what was raised has come out before rank 1 began
            for _ in range(2):
                with pytest.raises(hvd.HvdError, match=r"rank 0 .*step\(\).*HVD309"):
                    world.optimizer.zero_grad()
            world.optimizer.step()
        world.batch()
        world.check()


@as_ranks(2)
def test_another_backward_on_gradients_that_were_thrown_away_is_told_too():
    world = World()
    world.batch()
    if hvd.rank() == 1:
        tell(0)
        world.batch()
    else:
        with pytest.raises(KeyboardInterrupt):
            raised_in_wait(world.batch, KeyboardInterrupt())
        tell(0)
        world.model.zero_grad()
        with pytest.raises(hvd.HvdError, match="HVD309"):
            world.backward()
    hvd.broadcast_parameters(world.model.state_dict(), 1)
    hvd.broadcast_optimizer_state(world.optimizer, 1)
    world.batch()
    world.check()


@as_ranks(2)
def test_a_step_that_was_left_half_way_is_told():
    world = World()
    world.batch()
    hook = world.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    kept = signal.signal(signal.SIGUSR2, lambda *_: [][0])
    try:
        if hvd.rank() == 0:
            with pytest.raises(IndexError):
                world.batch()
            hook.remove()
            for call in (world.optimizer.zero_grad, world.optimizer.step):
                with pytest.raises(hvd.HvdError, match="rank 0 .*took its step.*HVD309"):
                    call()
        else:
            hook.remove()
            world.batch()
    finally:
        signal.signal(signal.SIGUSR2, kept)
    hvd.broadcast_parameters(world.model.state_dict(), 1)
    hvd.broadcast_optimizer_state(world.optimizer, 1)
    world.batch()
    world.check()


class Once(hvd.Compression.fp16):
    """Raises once, in the middle of putting averages in place."""

    armed = False

    @staticmethod
    def decompress(tensor, ctx):
        if Once.armed and tensor.dim() == 2:
            Once.armed = False
            raise KeyboardInterrupt
        return hvd.Compression.fp16.decompress(tensor, ctx)


@pytest.mark.parametrize("arguments", [{}, {"groups": 2}, {"weighted": True}], ids=str)
@as_ranks(2)
def test_averages_are_put_in_place_once_more_if_that_was_interrupted(arguments):
    if arguments.get("weighted"):
        arguments = {"op": hvd.WeightedAverage(2.0 + hvd.rank())}
    world = World(compression=Once, **arguments)
    world.batch()
    Once.armed = hvd.rank() == 0
    try:
        world.batch()
    except KeyboardInterrupt:
        world.optimizer.step()
    world.check()


def skipped(interrupt):
    """Rank 0 skips a pass, `interrupt(world)` interrupts that, and rank 1 takes part when rank 0 goes on."""
    world = World()
    world.batch()
    if hvd.rank() == 0:
        hook = world.model[0].weight.register_hook(lambda _: [][0])
        with pytest.raises(IndexError):
            world.batch()
        hook.remove()
        interrupt(world)
        tell(0)
        world.optimizer.zero_grad()
    else:
        tell(0)
        with pytest.raises(hvd.HvdMismatchError, match="rank 0 skipped.*HVD308"):
            world.batch()
    world.batch()
    world.check()


@as_ranks(2)
def test_a_skip_that_was_interrupted_goes_on_with_the_next_call():
    def interrupt(world):
        for kind in KINDS:
            with pytest.raises(kind, match="mine"):
                raised_in_wait(world.optimizer.zero_grad, kind("mine"))

    skipped(interrupt)


@as_ranks(2)
def test_a_skip_that_a_signal_handler_interrupts_when_it_has_been_sent_is_not_sent_twice():
    from hvdlite.torch.optimizer import buckets

    send = buckets.send_skip

    def interrupted_at_once(wire, number):
        handles = send(wire, number)
        if number == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        return handles

    def interrupt(world):
        kept = signal.signal(signal.SIGUSR2, lambda *_: [][0])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(IndexError):
            patch.setattr(buckets, "send_skip", interrupted_at_once)
            world.optimizer.zero_grad()
        signal.signal(signal.SIGUSR2, kept)

    skipped(interrupt)


@as_ranks(2)
def test_a_combination_by_adasum_that_was_interrupted_goes_on_with_the_next_call():
    world = World(op=hvd.Adasum)
    world.batch()
    for number, kind in enumerate(KINDS):
        if hvd.rank() == 1:
            tell(0)
            world.batch()
        else:
            with pytest.raises(kind, match="mine"):
                raised_in_wait(world.batch, kind("mine"))
            tell(0)
            if number % 2:
                world.optimizer.zero_grad()
        world.batch()
        world.check()


@as_ranks(2)
def test_a_local_step_of_adasum_that_was_interrupted_is_undone():
    world = World(op=hvd.Adasum)
    world.batch()
    if hvd.rank() == 0:
        hook = world.optimizer.register_step_post_hook(lambda *_: [][0])
        with pytest.raises(IndexError):
            world.batch()
        hook.remove()
    world.batch()
    world.check()


# Left out is what comes when the averages are there and nothing has been done with them: to a script that is as an
# exception of its own between backward and step, of which nobody knows.
SPARED = "step", "end", "__call__", "no_grad", "__enter__"


def interrupted_batch(world, number):
    """Whether there was such an instruction. A script that catches everything, and heeds what it is told."""
    before, tracer = hvd.counters()["submits"], Raises(number, KeyboardInterrupt, SPARED)
    sys.settrace(tracer)
    try:
        world.batch()
        sys.settrace(None)
    except KeyboardInterrupt:
        try:
            world.optimizer.zero_grad()
        except hvd.HvdError as error:
            if "took its step" in str(error):
                return None
            world.optimizer.step()
    if hvd.counters()["submits"] == before:  # nothing was sent: the others wait for a batch
        world.batch()
    return tracer.left > 0


@pytest.mark.parametrize("op", ["average", "int8", *everything("sum")])
@as_ranks(2, deadline=600)
def test_an_exception_at_any_instruction_of_a_step_parts_no_weights(op):
    arguments = {"op": hvd.Sum if op == "sum" else hvd.Average}
    if op == "int8":
        pretend(1)
        arguments["compression"] = hvd.Compression.int8(least_bytes=0, bucket_mb=0.0003)
    world = World(**arguments)
    for _ in range(4):
        world.batch()
    number, ended = 1 + len(op), False
    while not ended:
        if hvd.rank() == 0:
            ended = interrupted_batch(world, number)
        else:
            try:
                world.batch()
            except hvd.HvdMismatchError as error:
                assert error.code == "HVD308"
                world.optimizer.zero_grad()
        ended = hvd.broadcast_object(ended, 0)
        if ended is None:
            break
        world.batch()
        world.check()
        number += 4 * EVERY
    assert number > 2000


@as_ranks(2)
def test_what_a_handler_raises_in_a_broadcast_of_weights_comes_out_at_once():
    from hvdlite.torch import state_broadcast

    for kind in KINDS:
        named = [(f"{kind.__name__}.{number}", torch.zeros(3)) for number in range(2)]

        def call():
            state_broadcast._broadcast_tensors(named, 1, "weights", hvd.global_process_set)  # noqa: B023

        if hvd.rank() == 0:
            with pytest.raises(kind, match="mine"):
                raised_in_wait(call, kind("mine"))
            tell(0)
        else:
            tell(0)
            call()
