"""The state in a file: a job that has ended in whatever way goes on from its last commit; a file that is damaged or of
another training is refused. Keras and TensorFlow: test_tf_elastic.py.
"""

import os
import signal
import sys
import time

import pytest
from elastic_jobs import ElasticJob
from launching import launch
from ranks import as_ranks, everything

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import elastic  # noqa: E402
from hvdlite.elastic import checkpoint  # noqa: E402
from hvdlite.errors import HorovodInternalError, HvdStateError  # noqa: E402

PLAN = {"samples": 480, "epochs": 1000, "pause": 0.01}


@pytest.mark.parametrize("ranks", [2, *everything(4)])
def test_a_job_that_was_killed_as_a_whole_goes_on_with_other_ranks(tmp_path, ranks):
    plan, at = {**PLAN, "saved": str(tmp_path / "state")}, 5
    for size, words in ((3, ("--min-np", "1")), (ranks, ("--min-np", "1")), (3, ())):  # the last one has fixed ranks
        with ElasticJob(tmp_path, "-np", str(size), *words, plan=plan) as job:
            job.until_training(size, at)
            at += 10
            assert job.out.count("goes on from" if at > 15 else "yet: training begins") == 1, job.out
            if size == 3 and not words:
                (tmp_path / "last").touch()
                assert job.finish() == [3, ranks, 3]
                return
            job.process.kill()
            job.process.wait()
            job.until_gone()


def test_a_restart_goes_on_from_the_file(tmp_path):
    plan = {**PLAN, "saved": str(tmp_path / "state")}
    with ElasticJob(tmp_path, "-np", "2", "--max-restarts", "1", plan=plan) as job:
        job.until_training(2, 5)
        job.kill(1)
        job.until_training(2, 15)
        (tmp_path / "last").touch()
        assert job.finish() == [2] and "restart 1 of 1" in job.out


def test_a_file_that_was_cut_or_changed_anywhere_is_refused(tmp_path):
    path = str(tmp_path / "state")
    checkpoint.write(path, {"step": 5})
    with open(path, "rb") as file:
        whole = file.read()
    changed = [whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :] for at in range(len(whole))]
    for content in (*(whole[:at] for at in range(len(whole))), *changed, whole + b"x"):
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(HvdStateError, match=rf"^{path} is not a state .*changed since.*\[HVD425\]$"):
            checkpoint.read(path)
    assert checkpoint.read(path + ".none") is None


class Dies:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_midst_of_a_write_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "state")
    checkpoint.write(path, {"step": 5})
    pid = os.fork()
    if pid == 0:
        checkpoint.write(path, [bytes(1 << 20), Dies()])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left,) = {*os.listdir(tmp_path)} - {"state"}
    assert left.endswith(f".{pid}.part") and checkpoint.read(path) == {"step": 5}
    stay = ["state.1.part", f"state.other.{pid}.part", "state2.other.1.part", left.replace(str(pid), str(os.getpid()))]
    for name, age in ((stay[0], 9999), (stay[1], 0), (stay[2], 9999), (stay[3], 0), ("state.other.1.part", 9999)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    checkpoint.Kept(path, 0, unread=True).load_into(Holds())
    assert sorted(os.listdir(tmp_path)) == sorted(["state", *stay])


class Holds:
    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("there", [False, True])
def test_the_file_belongs_to_the_job_that_wrote_first(tmp_path, capsys, there):
    path = str(tmp_path / "state")
    if there:
        checkpoint.write(path, 0)
    one, other = (checkpoint.Kept(path, 0, unread=True) for _ in range(2))
    for kept in (one, other):
        kept.load_into(Holds())
    assert one.write(1) and one.write(2) and not other.write(3) and not other.is_due()
    other.ranks_changed()
    other.ended(lambda: 4)
    assert not other.write(5) and one.write(6) and checkpoint.read(path) == 6
    assert capsys.readouterr().err.count(f"another job also writes {path}: ") == 1
    next_rank = checkpoint.Kept(path, 0, unread=False)
    assert next_rank.write(7)
    one.ranks_changed()
    assert one.write(8)
    os.unlink(path)
    assert one.write(9)


def test_what_cannot_be_written_is_told_each_minute_and_what_cannot_be_pickled_is_named(tmp_path, monkeypatch, capsys):
    kept = checkpoint.Kept(str(tmp_path / "none" / "state"), 60, unread=True)
    assert not kept.write(1)
    (tmp_path / "none").mkdir()
    assert kept.write(2)
    (tmp_path / "none").rename(tmp_path / "elsewhere")
    assert not kept.write(3)
    now = time.monotonic()
    assert not kept.is_due()
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now + 61)
    assert kept.is_due() and not kept.write(4)
    assert capsys.readouterr().err.count(f"state cannot be written ({os.strerror(2)}): ") == 2
    with pytest.raises(HvdStateError, match=rf"saved to {tmp_path}/state: attribute 'out' .*\[HVD425\]"):
        checkpoint.Kept(str(tmp_path / "state"), 0, unread=True).write({"objects": {"step": 1, "out": sys.stdout}})
    assert os.listdir(tmp_path) == ["elsewhere"]


FULL = """
import resource, signal, sys
import hvdlite as hvd
from hvdlite.elastic import ObjectState, run

hvd.init()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, data=b"")
state.save_to(sys.argv[1])

@run
def train(state):
    for state.step in range(5):
        state.data = bytes(9000 * (state.step in (1, 2, 4)))
        state.commit()

train(state)
"""


def test_training_goes_on_when_the_disk_is_full(tmp_path):
    code, out, err = launch("-np", 2, sys.executable, "-c", FULL, tmp_path / "state")
    assert code == 0 and err.count("cannot be written (File too large)") == 1, out + err
    assert checkpoint.read(tmp_path / "state")["objects"]["step"] == 3 and os.listdir(tmp_path) == ["state"]


def training(path, seed, width=3, **more):
    """A state with model, Adam, scheduler and sampler, none of which is as that of another seed."""
    torch.manual_seed(seed)
    model, sampler = torch.nn.Linear(width, 1), hvd.elastic.ElasticSampler(range(40), seed=1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1 * seed), model.named_parameters())
    more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, **more)
    state.save_to(path)
    return state


def step(state):
    batch = torch.tensor([state.sampler.get_indices(0, 2)], dtype=torch.float32).mean() * torch.ones(1, 3)
    state.optimizer.zero_grad()
    state.model(batch).sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.sampler.record_batch(0, 2)


@as_ranks(2)
def test_model_optimizer_scheduler_and_sampler_go_on(tmp_path):
    def train(state, steps):
        for _ in range(steps):
            step(state)
            state.sampler.reset()
        state.commit()
        kept = [state.model, state.optimizer, state.scheduler]
        return str([[each.state_dict() for each in kept], list(state.sampler), state.epoch])

    path = hvd.broadcast_object(str(tmp_path / "state"))
    once = elastic.run(train)(training(path + ".1", 1, epoch=1), 5)
    elastic.run(train)(training(path, 1, epoch=1), 3)
    first = training(path, 2 + hvd.rank(), epoch=7)
    assert elastic.run(train)(first, 2) == once
    others = {
        "RuntimeError": training(path, 1, width=2, epoch=0),
        "HvdStateError: this state has no epoch ": training(path, 1),
        "HvdStateError: it has no best, loss; this state has no epoch ": training(path, 1, best=0, loss=0),
    }
    for why, other in others.items():
        if hvd.rank() == 0:
            with pytest.raises(HvdStateError, match=rf"(?s){path} is the state of another training: {why}.*\[HVD425\]"):
                other._file.load_into(other)
    alone = hvd.elastic.TorchState(handled=1)
    alone._handlers["handled"] = hvd.elastic.state.StateHandler(1)
    with pytest.raises(HvdStateError, match=r"StateHandler has no saved\(\) and take\(\)"):
        alone.save_to(path)


@as_ranks(2)
def test_the_file_has_the_samples_of_all_ranks_and_the_last_commit(tmp_path):
    path, sampler = hvd.broadcast_object(str(tmp_path / "state")), hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler, step=0)
    state.save_to(path, seconds=3600)

    @elastic.run
    def train(state):
        for state.step in range(2):
            sampler.record_indices([4 * hvd.rank() + state.step])
            state.commit()
        state.step = 7  # committed by nobody

    train(state)
    kept = checkpoint.read(path) if hvd.rank() == 0 else None
    assert kept is None or kept["objects"]["step"] == 1
    assert kept is None or kept["handlers"]["sampler"]["processed_indices"] == {0, 1, 4, 5}
    state._file.taken = hvd.rank() == 0
    state.commit()
    assert state._file.taken  # of whoever is rank 0 next


@as_ranks(2)
def test_what_cannot_be_sent_is_named():
    state = hvd.elastic.TorchState(step=0, each=(i for i in range(3)))
    text = r"^attribute 'each' of the state cannot be pickled \(TypeError: .*; keep it outside of the State \[HVD425\]$"
    with pytest.raises((HvdStateError, HorovodInternalError), match=text if hvd.rank() == 0 else None):
        try:
            state.sync()
        finally:
            hvd.shutdown()
