"""The names of elastic training work while the ranks stay; a lost rank is a clear error, other errors stay."""

import re
import sys

import pytest
from ranks import Job, as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite.elastic import HostUpdateResult, run_fn  # noqa: E402
from hvdlite.errors import HostsUpdatedInterrupt  # noqa: E402
from hvdlite.torch.elastic.state import (  # noqa: E402
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@as_ranks(1, 2)
def test_state_is_synchronized_saved_and_restored():
    model = network(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    log = [hvd.rank()]
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, scaler=scaler, epoch=hvd.rank(), log=log)
    assert state.model is model and state.optimizer is optimizer and state.log is log
    state.sync()
    hvd.check_consistency(model, optimizer)
    assert (state.epoch, state.log) == (0, [0])
    saved = model.weight.detach().clone()
    step(model, optimizer)
    scheduler.step()
    state.epoch += 1
    state.log.append(5)
    state.restore()
    assert torch.equal(model.weight, saved) and not optimizer.state_dict()["state"]
    assert (state.epoch, state.log, scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, [0], 0, 0.1)
    step(model, optimizer)
    state.epoch, kept = 4, model.weight.detach().clone()
    state.commit()
    step(model, optimizer)
    state.epoch = 9
    state.restore()
    assert state.epoch == 4 and torch.equal(model.weight, kept) and optimizer.state_dict()["state"]


@as_ranks(1)
def test_an_object_that_takes_the_place_of_another_is_handled():
    state = hvd.elastic.TorchState(network(0), lock=sys.stdout)
    other = network(1)
    state.model = other
    wanted = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other and torch.equal(other.weight, wanted) and state.lock is sys.stdout


@as_ranks(1)
def test_users_handlers_come_first():
    class Counter:
        value = 0

    class CounterHandler(StateHandler):
        def save(self):
            self.kept = self.value.value

        def restore(self):
            self.value.value = self.kept

        def sync(self):
            self.value.value = hvd.broadcast_object(self.value.value)

    before = get_handler_registry()
    set_handler_registry([(Counter, CounterHandler), *before])
    try:
        counter = Counter()
        state = hvd.elastic.TorchState(counter=counter)
        state.save()
        counter.value = 5
        state.restore()
        state.sync()
        assert state.counter is counter and counter.value == 0
        assert isinstance(hvd.elastic.TorchState(network(0))._handlers["model"], StateDictHandler)
    finally:
        set_handler_registry(before)


@as_ranks(2)
def test_news_of_hosts_interrupt_all_ranks_alike():
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    state.commit()
    if hvd.rank() == 0:
        state.on_hosts_updated(1.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    if hvd.rank() == 0:
        state.on_hosts_updated(2.0, HostUpdateResult.removed)
        state.on_hosts_updated(1.5, HostUpdateResult.added)  # older: known already
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    state.check_host_updates()


class Recorded(hvd.elastic.State):
    def __init__(self):
        super().__init__(bcast_object=lambda obj: obj, get_rank=lambda: 0)
        self.calls = []
        self.register_reset_callbacks([lambda: self.calls.append("first"), lambda: self.calls.append("second")])

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")

    def reset(self):
        self.calls.append("state.reset")


def run_once(*ends):
    """What happens to a state while a training function ends in these ways, one call after the other."""
    state, left = Recorded(), list(ends)

    def train(state, factor, plus=0):
        state.calls.append("train")
        end = left.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end * factor + plus

    result = run_fn(train, lambda: state.calls.append("reset"))(state, 10, plus=1)
    return result, state.calls


AFTER = ["reset", "state.reset", "first", "second"]


def test_the_order_of_recovery_is_horovods():
    assert run_once(4) == (41, ["sync", "train"])
    lost = hvd.HvdPeerLostError("rank 1 is lost")
    assert run_once(lost, 1) == (11, ["sync", "train", "restore", *AFTER, "sync", "train"])
    assert run_once(HostsUpdatedInterrupt(), 1) == (11, ["sync", "train", "save", *AFTER, "sync", "train"])
    assert run_once(HostsUpdatedInterrupt(True), 1) == run_once(HostsUpdatedInterrupt(), 1)  # skip_sync is ignored


@pytest.mark.parametrize("error", [hvd.HvdMismatchError("shapes"), ValueError("mine"), hvd.HvdTimeoutError("late")])
def test_errors_that_would_come_again_are_not_retried(error):
    """B7: in Horovod a mismatch is recovered from for ever."""
    with pytest.raises(type(error)) as caught:
        run_once(error, 1)
    assert caught.value is error


def test_a_lost_rank_is_a_not_yet_error_that_tells_the_cause():
    state = Recorded()
    lost = hvd.HvdPeerLostError("rank 1 is lost")

    @hvd.elastic.run
    def train(state):
        """Documented."""
        raise lost

    assert (train.__name__, train.__doc__) == ("train", "Documented.")
    with pytest.raises(hvd.HvdNotYetError, match="--min-np") as caught:
        train(state)
    assert caught.value.__cause__ is lost and state.calls == ["sync", "restore"]


LOSES_A_RANK = """
import os, signal, torch, hvdlite.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
state = hvd.elastic.TorchState(model, step=0)

@hvd.elastic.run
def train(state):
    while True:
        hvd.allreduce(torch.ones(1), name="gradient")
        if hvd.rank() == 1 and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()

try:
    train(state)
except hvd.HvdNotYetError as error:
    print("cause", type(error.__cause__).__name__, error.__cause__.rank, "state", state.step, flush=True)
"""


def test_a_rank_that_is_really_lost():
    with Job(2, [sys.executable, "-c", LOSES_A_RANK]) as job:
        assert job.wait(60) == 137
        assert re.search("cause HvdPeerLostError 1 state [34]", job.text())  # saved before or after the loss was seen


def dealt(sampler):
    return hvd.allgather_object(list(sampler))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 16])
@as_ranks(1, 3)
def test_the_sampler_deals_all_samples_evenly(count):
    sampler = hvd.elastic.ElasticSampler(range(count), seed=3)
    parts = dealt(sampler)
    assert {len(part) for part in parts} == {len(sampler)} == {-(-count // hvd.size())}
    assert {index for part in parts for index in part} == set(range(count))
    assert sum(map(len, parts)) - count < hvd.size()
    first = parts
    sampler.set_epoch(1)
    if count == 16:
        assert dealt(sampler) != first
        sampler.set_epoch(0)
        assert dealt(sampler) == first
    plain = hvd.elastic.ElasticSampler(range(count), shuffle=False)
    if count:
        assert next(iter(plain)) == hvd.rank() % count


@as_ranks(1, 2)
def test_the_sampler_goes_on_where_it_was():
    data = list(range(20))
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    state = hvd.elastic.TorchState(sampler=sampler)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    seen = []
    for number, batch in enumerate(loader):
        assert batch.tolist() == sampler.get_indices(number, 2)
        seen += batch.tolist()
        sampler.record_batch(number, 2)
        if number == 1:
            break
    state.commit()
    sampler.record_batch(2, 2)
    state.restore()
    state.on_reset()
    rest = list(sampler)
    whole = [index for part in hvd.allgather_object((seen, rest)) for half in part for index in half]
    assert sorted(whole) == data
    other = hvd.elastic.ElasticSampler(data, seed=1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == rest
    sampler.set_epoch(1)
    assert len(sampler) == 20 // hvd.size()


@as_ranks(2)
def test_samples_recorded_by_any_rank_are_processed():
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_indices([2, 3] if hvd.rank() == 0 else [5])
    state.save()
    state.sync()
    assert sorted(index for part in dealt(sampler) for index in part) == [0, 0, 1, 4, 6, 7]
    assert len(sampler) == 3


def test_no_sampler_before_init():
    code = "import hvdlite.torch as hvd\nhvd.elastic.ElasticSampler(range(3))"
    with Job(1, [sys.executable, "-c", code]) as job:
        assert job.wait(60) == 1
        assert re.search("HvdNotInitializedError: .*hvd.init", job.text())
