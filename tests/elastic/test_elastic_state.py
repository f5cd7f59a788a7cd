"""A state is of one commit, whole, whoever is lost and whenever, and has nothing of a step that was left; what a rank
alone knows is told in time; a newcomer whose model is another one fails alone; the loop goes on after losses."""

import contextlib
import pickle
import sys

import pytest
from launching import launch
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import elastic  # noqa: E402
from hvdlite.process_sets import static  # noqa: E402
from hvdlite.rendezvous import elastic_member  # noqa: E402
from hvdlite.torch.elastic import state as handlers  # noqa: E402


@contextlib.contextmanager
def elastic_job(commit):
    """These ranks as if hvdlite-run --min-np had started them, and this one's last commit had this number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_member, "is_elastic", lambda: True)
        patch.setattr(elastic_member, "commit", commit)
        patch.setattr(elastic_member, "calls", 0)
        yield


def linear(value, inputs=2):
    model = torch.nn.Linear(inputs, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(value))
    return model


class SavesInItsSync(handlers.StateDictHandler):
    """As handlers written for Horovod do."""

    def sync(self):
        super().sync()
        self.save()


def fails(*args, **kwargs):
    raise hvd.HvdPeerLostError("rank 1 is lost")


@pytest.mark.parametrize("at", ["samples", "optimizer", "copies", "objects", None])
@as_ranks(2)
def test_a_sync_that_ends_anywhere_leaves_one_commit(at):
    mine = 4 + hvd.rank()
    model, scaler = linear(mine), torch.amp.GradScaler("cpu", init_scale=float(mine))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=mine)
    sampler = hvd.elastic.ElasticSampler(range(20))
    sampler.processed_num = mine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "_handler_registry", [(type(scaler), SavesInItsSync), *handlers._handler_registry])
        state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, sampler=sampler, step=mine)
    last = state._handlers["optimizer"]
    place = {
        "samples": (handlers, "allgather_object"),
        "optimizer": (handlers, "broadcast_optimizer_state"),
        "copies": (last, "save"),
        "objects": (state, "_bcast_object"),
    }
    with pytest.MonkeyPatch.context() as patch:
        if at is not None:
            patch.setattr(*place[at], fails)
        with contextlib.nullcontext() if at is None else pytest.raises(hvd.HvdPeerLostError):
            state.sync()
    state.restore()
    found = [model.weight[0, 0].item(), optimizer.param_groups[0]["lr"], scaler.get_scale(), sampler.processed_num]
    assert [*found, state.step] == [4 if at is None else mine] * 5


WAYS = ["plain", "original", "hook", "groups", "later", "no_sync", "passes", "scaled", "adasum", "alone"]
OF = {"passes": {"backward_passes_per_step": 2}, "adasum": {"op": hvd.Adasum}, "groups": {"groups": 1}}


class Loop:
    """Steps of two passes that clear gradients afterwards, with an optimizer of one of the WAYS."""

    def __init__(self, way, seed=3):
        torch.manual_seed(seed)
        self.way, self.model = way, torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        frozen = torch.nn.Linear(1, 1).requires_grad_(False)
        frozen.weight.grad = torch.ones(1, 1)  # no step uses it up
        first = self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if way != "alone":
            self.optimizer = hvd.DistributedOptimizer(first, **OF.get(way, {}))
        self.optimizer.wait_in_backward = way != "later"
        if way == "hook":
            self.optimizer.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer()))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "scaled")
        given = first if way == "original" else self.optimizer
        self.state = hvd.elastic.TorchState(self.model, given, scaler=self.scaler, frozen=frozen, step=0)

    def one(self, number, seed=0, leaves=False):
        """A pass. `leaves`: it ends when the last layer has its gradients, and the first has none."""
        generator = torch.Generator().manual_seed(100 * self.state.step + 10 * number + seed)
        loss = self.scaler.scale(self.model(torch.randn(4, 2, generator=generator)).square().mean())
        with contextlib.ExitStack() as stack:
            if self.way == "no_sync" and not number:
                stack.enter_context(self.optimizer.no_sync())
            if leaves:
                stack.callback(self.model[0].weight.register_hook(fails).remove)
                stack.enter_context(pytest.raises(hvd.HvdPeerLostError))
            loss.backward()

    def step(self):
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.state.step += 1
        self.state.commit()
        return self.model[0].weight.detach().clone()


@pytest.mark.parametrize("way", WAYS)
@as_ranks(2)
def test_nothing_of_a_step_that_was_left_is_in_the_next(way):
    weights = []
    for leaves in (False, True):
        with elastic_job(0):
            loop = Loop(way)
            for step in range(3):
                for left in (0, 1, 2) if leaves and step else ():
                    for number in range(left + 1 if left < 2 else 2):
                        loop.one(number, 7 + hvd.rank(), leaves=number == left)
                    if left == 2:
                        loop.scaler.unscale_(loop.optimizer)
                    loop.state.restore()
                    assert {each.grad for each in loop.model.parameters()} == {None}
                    assert loop.state.frozen.weight.grad.item() == 1
                loop.one(0, hvd.rank())
                loop.one(1, hvd.rank())
                last = loop.step()
        weights.append(last)
    assert torch.equal(*weights)


@pytest.mark.parametrize("by", ["restore", "file", "sync"])
@pytest.mark.parametrize("way", WAYS)
@as_ranks(2)
def test_a_commit_within_a_step_keeps_what_the_step_needs(way, by):
    """Ranks have the same data here: the sums of rank 0 stand for those of all."""
    weights, said = [], []
    for leaves in (False, True):
        with elastic_job(0), pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "warn", said.append)
            loop = Loop(way)
            for number in (0, 1):
                loop.one(number)
            loop.step()
            loop.one(0)
            loop.state.commit()
            if leaves:
                loop.one(1, leaves=True)
                loop.state.restore()
                kept = pickle.loads(pickle.dumps(loop.state.state_dict()))
                if by != "restore":
                    loop = Loop(way, seed=4)
                    if by == "file" or hvd.rank() == 0:
                        loop.state.load_state_dict(kept)
                    if by == "sync":
                        loop.state.sync()
            loop.one(1)
            weights.append(loop.step())
    assert torch.equal(*weights)
    own = by == "sync" and hvd.rank() == 0 and way in ("no_sync", "passes")  # else sums are averages, or nobody knows
    assert [text.count("HVD243") for text in said] == [1] * own


@pytest.mark.parametrize("lost", [False, True])
@as_ranks(2)
def test_what_is_set_before_training_begins_counts(lost):
    model, mine = torch.nn.Linear(1, 1), 5 + hvd.rank()
    sampler = hvd.elastic.ElasticSampler(range(40))
    state = hvd.elastic.TorchState(model, epoch=0, sampler=sampler, log=[])
    with torch.no_grad():
        model.weight.fill_(mine)
    state.epoch, sampler.epoch = mine, mine
    state.log.append(mine)
    with elastic_job(-1), pytest.MonkeyPatch.context() as patch:
        if lost:
            patch.setattr(state, "_bcast_object", fails)
        with pytest.raises(hvd.HvdPeerLostError) if lost else contextlib.nullcontext():
            elastic._synchronize(state)
        state.restore()
        mine = mine if lost else 5
        assert [state.epoch, model.weight.item(), sampler.epoch, *state.log] == [mine] * 4
        patch.undo()
    state.epoch = 8 + hvd.rank()
    state.log.append(8)
    torch.nn.init.constant_(model.weight, state.epoch)
    state.sync()  # by hand
    state.log.append(9)  # of this copy alone
    state.restore()
    assert [state.epoch, model.weight.item(), state.log[1:]] == [8, 8, [8]]


@as_ranks(2)
def test_samples_of_a_lost_rank_are_known_and_those_of_a_commit_taken_back_do_not_count():
    sampler = hvd.elastic.ElasticSampler(range(9), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler, step=0)
    with elastic_job(-1):
        assert elastic._synchronize(state) is None and elastic_member.commit == 0
        if hvd.rank() == 1:  # the other has named none yet
            sampler.record_indices([5])
        state.commit()
        assert sampler.processed_indices == {5} and not sampler.unshared
        sampler.record_indices([hvd.rank()])
        state.commit()
        assert elastic_member.commit == 2
        sampler.record_indices([7])
        state.restore()
        assert sampler.processed_indices == {0, 1, 5}
        sampler.record_indices([2 + hvd.rank()])
        if hvd.rank() == 1:  # it has saved the next commit, which the other has not
            state._number = elastic_member.commit + 1
            state.save()
            elastic_member.commit += 1
        else:
            state.restore()
        assert elastic._synchronize(state) is None and elastic_member.commit == 2
        state.restore()
        assert sampler.processed_indices == {0, 1, 5}
        sampler.record_indices([8] if hvd.rank() == 1 else [])
        state.save()  # no commit: what is not told yet stays so
        state.restore()
        state.commit()
        assert sampler.processed_indices == {0, 1, 5, 8}


@as_ranks(1)
def test_an_optimizer_made_by_one_rank_of_a_job_that_may_grow_is_distributed():
    weights = []
    for wraps in (False, True):
        model = linear(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            assert hvd.DistributedOptimizer(torch.optim.SGD(linear(1.0).parameters(), lr=0.1))._hvd is None
            with elastic_job(0):
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            assert optimizer._hvd is not None
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


@as_ranks(3)
def test_a_newcomer_with_another_model_fails_alone():
    new = hvd.rank() == 2
    met = []

    def meet():
        met.append(1)
        hvd.shutdown()
        hvd.init()

    def train(state):
        return state.model.weight[0, 0].item(), state.step, len(met)

    with elastic_job(-1 if new else 4):
        loop, state = elastic.run_fn(train, meet), hvd.elastic.TorchState(linear(6 + hvd.rank()), step=hvd.rank())
        if new:
            alone = hvd.elastic.TorchState(linear(0, inputs=3), step=9)
            with pytest.raises(hvd.HvdMismatchError) as caught:
                loop(alone)
            assert caught.value.ranks == (2,) and not hvd.is_initialized()
            hvd.init()  # in its place comes one with the right model
            elastic_member.calls = 0
        assert loop(state) == (6.0, 0, 0 if new else 1) and elastic_member.commit == 4


@as_ranks(2)
def test_other_models_of_ranks_that_began_together_are_everybodys_error():
    with elastic_job(-1), pytest.raises(hvd.HvdMismatchError) as caught:
        elastic.run(lambda state: None)(hvd.elastic.TorchState(linear(0, inputs=2 + hvd.rank())))
    assert caught.value.ranks == (1,) and hvd.is_initialized()


def test_static_sets_that_have_lost_ranks_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(static, "_named", [hvd.ProcessSet(ranks) for ranks in ([0], [0, 1], [1, 3])])
    assert [each.ranks for each in static.of_incarnation(None, 0, 2)] == [[0]]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "[1, 3] (there is no rank 3 in a job of 2 ranks)" in said and "[0, 1] (" in said
    assert static.of_incarnation(None, 1, 2) and not capsys.readouterr().err
    assert len(static.of_incarnation(None, 0, 4)) == 3 and not capsys.readouterr().err


LOOP = """
import os, signal, sys
import hvdlite as hvd
from hvdlite.elastic import ObjectState, run
from hvdlite.errors import HostsUpdatedInterrupt

class State(ObjectState):
    def sync(self):
        if hvd.size() == 3 and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # the second one, while the others take the state
        super().sync()

hvd.init()
state = State(hvd.broadcast_object, hvd.rank, steps=[], interrupted=False)
calls = []
state.register_reset_callbacks([lambda: calls.append(int(hvd.allreduce(1, op=hvd.Sum)))])

@run
def train(state):
    while len(state.steps) < 9:
        if len(state.steps) == 5 and hvd.size() == 4 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(1, name="gradient")
        state.steps.append((len(state.steps), hvd.size()))
        if len(state.steps) == 3 and not state.interrupted:
            state.interrupted = True
            raise HostsUpdatedInterrupt(skip_sync=True)
        if len(state.steps) % 2 == 0:
            state.commit()

train(state)
assert [step for step, _ in state.steps] == list(range(9))
print("sizes", [size for _, size in state.steps], "callbacks", calls, flush=True)
"""


def test_the_loop_goes_on_after_an_interrupt_a_loss_and_a_loss_within_sync():
    words = ("-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "999", "999", sys.executable, "-c", LOOP)
    code, out, err = launch(*words)
    assert code == 0, out + err
    assert out.count("sizes [4, 4, 4, 4, 2, 2, 2, 2, 2] callbacks [4, 3, 2]") == 2, out + err


@pytest.mark.parametrize(
    "other, ranks, says",
    [
        ((1, {"model": "Net", "step": "an object", "sampler": "ElasticSampler"}), (2,), "rank 2 has sampler (Elast"),
        ((1, {"model": "Net"}), (2,), "rank 2 has no step, and that of rank 0 has step (an object)"),
        ((1, {"model": "Adam", "step": "an object"}), (2,), "has model (Adam), and that of rank 0 has model (Net)"),
        ((2, {"model": "Net", "step": "an object"}), (2,), "rank 2 is in training function 2 of its script"),
        ((1, {"model": "Net", "step": "an object"}), (), ""),
    ],
)
def test_states_of_other_forms_and_other_training_functions_are_told_before_anything_is_sent(other, ranks, says):
    first = 1, {"step": "an object", "model": "Net"}
    try:
        elastic.state_form.require_same([first, first, other])
    except hvd.HvdMismatchError as error:
        assert says and says in str(error) and error.ranks == ranks
    else:
        assert not says
