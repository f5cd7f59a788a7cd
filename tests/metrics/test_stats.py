"""hvd.stats() and hvd.report(): what training steps cost, counted without being asked."""

import json
import os
import time

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite.numpy as hvd
from hvdlite.metrics import report_text, step_log, step_rows, stragglers, summary
from hvdlite.training.step_source import IDLE_MAX, Whose


def _anew(**environ):
    """Another life of the job, with these options."""
    hvd.shutdown()
    for name, value in environ.items():
        os.environ[name] = value
    hvd.init()


@as_ranks(1, 2)
def test_steps_and_totals_are_counted_and_bad_words_refused():
    hvd.shutdown()
    for asked in (hvd.stats, hvd.report, hvd.stats_step, lambda: hvd.write_stats(_Writer(), 0)):
        with pytest.raises(hvd.HvdNotInitializedError):
            asked()
    hvd.init()
    none = hvd.stats()
    assert none["steps"] == none["window"] == 0 and none["step_ms"] is none["exposed_ms"] is None
    assert "none so far" in hvd.report(show=False)
    hvd.allreduce(np.ones(1000, np.float32), name="before")
    total = hvd.stats()["totals"]
    assert total["tensors"] == 1 and total["buckets"] == 1 and list(total["bytes"].values()) == [4000]
    for _ in range(5):
        for name in "ab":
            hvd.allreduce(np.ones(1000, np.float32), name=name)
        hvd.stats_step()
    mine = hvd.stats()
    (plane,) = mine["bytes"]
    assert plane == ("self" if hvd.size() == 1 else "shm") and mine["bytes"] == {plane: 8000.0}
    assert mine["steps"] == 5 and mine["window"] == 4  # the first holds all since init
    assert mine["messages"] == {plane: 2.0} and mine["buckets"]["per_step"] == 2.0
    assert mine["buckets"]["mean_bytes"] == 4000.0 and mine["buckets"]["sizes"] == {"4096": 11}
    assert mine["step_ms"]["mean"] >= mine["exposed_ms"] >= 0 and 0 <= mine["exposed_share"] <= 1
    assert (mine["exposed_ms"] > 0) == (mine["negotiation_ms"] > 0) == (hvd.size() > 1) or hvd.size() == 1
    assert mine["bandwidth"][plane] > 0 and mine["memory"]["cpu"] > 1 << 20
    assert mine["data_wait_ms"] is mine["optimizer_ms"] is None
    assert mine["core_memory"] == hvd.memory_stats() and json.loads(json.dumps(mine)) == mine
    text = hvd.report(show=False)
    assert f"rank {hvd.rank()} of {hvd.size()}" in text and plane in text and "exposed" in text
    for bad in ({"everyone": 1}, {"everyone": None}):
        with pytest.raises(TypeError, match="everyone"):
            hvd.stats(**bad)
    with pytest.raises(TypeError, match="show"):
        hvd.report(show="no")
    with pytest.raises(TypeError):
        hvd.stats(every=1)


class _Writer:
    def __init__(self):
        self.seen = {}

    def add_scalar(self, tag, value, step):
        self.seen[tag] = value, step


@as_ranks(2)
def test_a_writer_gets_the_numbers_of_steps():
    _anew()
    for _ in range(3):
        hvd.allreduce(np.ones(10), name="a")
        hvd.stats_step()
    writer = _Writer()
    hvd.write_stats(writer, 7)
    assert writer.seen["hvdlite/bytes/shm"] == (80.0, 7) and writer.seen["hvdlite/step_ms/mean"][0] > 0
    assert all(isinstance(value, float) for value, _ in writer.seen.values())
    hvd.write_stats(writer, 8, prefix="mine/")
    assert writer.seen["mine/messages/shm"] == (1.0, 8)
    for bad in ((None, 1), (object(), 1), (writer, "1"), (writer, True)):
        with pytest.raises(TypeError):
            hvd.write_stats(*bad)


@as_ranks(3)
def test_who_is_late_is_known_to_everyone_and_its_wait_is_not_its_own():
    _anew()
    late, mine = 1, np.ones(10)
    for _ in range(12):
        if hvd.rank() == late:
            time.sleep(0.02)
        hvd.allreduce(mine, name="a")
        hvd.stats_step()
    found = hvd.stats(everyone=True)
    of_late = found["lateness"][late]
    assert of_late["steps"] == 11 and of_late["last_share"] > 0.8 and of_late["p50_ms"] > 10, found["lateness"]
    others = [found["ranks"][rank] for rank in range(3) if rank != late]
    of_late = found["ranks"][late]
    for what in ("exposed_ms", "negotiation_ms"):
        assert min(each[what] for each in others) > of_late[what], found["ranks"]
    assert of_late["compute_ms"] > 10
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2]
    text = hvd.report(everyone=True, show=False)
    assert text.index("rank 1        last in") < text.index("rank 0        last in")


@as_ranks(2)
def test_waiting_for_data_is_measured_by_loaders_and_by_a_timer_around_any():
    from hvdlite.data.loaders import AsyncDataLoaderMixin, BaseDataLoader

    class Slow(BaseDataLoader):
        def __len__(self):
            return 4

        def _iterate(self):
            for number in range(4):
                time.sleep(0.005)
                yield number

    class Ahead(AsyncDataLoaderMixin, Slow):
        pass

    class Listed(list):
        """What is the loader's own stays it."""

        batch_size = 4

    for loader in (Slow(), Ahead(), hvd.data.timer(Slow()), hvd.data.timer(Listed(range(4)))):
        _anew()
        assert len(loader) == 4
        seen = []
        for batch in loader:
            seen.append(batch)
            hvd.allreduce(np.ones(10), name="a")
            hvd.stats_step()
        waited = hvd.stats()["data_wait_ms"]
        assert seen == [0, 1, 2, 3] and waited is not None and waited > 0
        if not isinstance(loader, Ahead) and not isinstance(getattr(loader, "_batches", None), list):
            assert waited > 4 and hvd.stats()["totals"]["data_wait_ms"] > 19
    assert loader.batch_size == 4
    with pytest.raises(TypeError, match="timer"):
        hvd.data.timer(3)


@as_ranks(2)
def test_steps_are_written_with_their_buckets(tmp_path):
    folder = f"{tmp_path}/new"
    _anew(HVDLITE_TRACE_DIR=folder, HVDLITE_TRACE_STEPS="1", HVDLITE_TRACE_EVERY="3")
    for _ in range(7):
        handles = [hvd.allreduce_async(np.ones(100), name=name) for name in "abcd"]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stats_step()
    _anew(HVDLITE_TRACE_STEPS="0")
    with open(f"{folder}/rank-{hvd.rank()}.steps.jsonl") as file:
        head, *steps = map(json.loads, file)
    assert head["format"] == step_log.FORMAT and head["rank"] == hvd.rank() and head["size"] == 2 and head["host"]
    assert head["clock"] == {"offset_ns": 0, "error_ns": 0}
    assert [step["step"] for step in steps] == list(range(1, 8))
    for before, step in zip(steps, steps[1:]):
        assert step["t"] == before["t"] + before["step_ns"] and step["bytes"] == {"shm": 3200}
        assert step["t"] < step["arrived_ns"] < step["t"] + step["step_ns"]
        assert step["data_wait_ns"] is step["optimizer_ns"] is None
        assert step["compute_ns"] == max(0, step["step_ns"] - min(step["exposed_ns"], step["step_ns"]))
    for step in steps:
        assert ("buckets" in step) == ("memory" in step) == (step["step"] % 3 == 0)
    for step in steps[2], steps[5]:
        buckets = step["buckets"]
        assert sum(bucket["tensors"] for bucket in buckets) == 4 and sum(each["bytes"] for each in buckets) == 3200
        assert {name for bucket in buckets for name in bucket["names"]} >= {"allreduce.a"}
        for bucket in buckets:
            assert step["t"] <= bucket["start"] <= bucket["end"] <= step["t"] + step["step_ns"]
            assert bucket["plane"] == "shm" and 1 <= len(bucket["names"]) <= 3
        assert step["memory"]["cpu"] > 1 << 20


@as_ranks(1)
def test_a_full_disk_is_told_of_once_and_training_goes_on(tmp_path):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        hvd.shutdown()
        hvd.init()
        full = step_log.Journal("/dev/null/nowhere", 0, 50, "here", step_rows.History())
        full.close()
        assert said.getvalue().count("cannot write steps") == 1, said.getvalue()
        written = step_log.Journal(_folder_of_full(), 0, 50, "here", step_rows.History())
        for _ in range(3):
            hvd.stats_step()
            written.write()
        written.close()
        os.mkfifo(tmp_path / "rank-0.steps.jsonl")  # that nobody reads
        step_log.Journal(str(tmp_path), 0, 50, "here", step_rows.History()).close()
    assert said.getvalue().count("cannot write steps") == 3 and "No space left" in said.getvalue()
    assert "rank-0.steps.jsonl: No such device or address" in said.getvalue()
    assert hvd.stats()["steps"] == 3


def _folder_of_full():
    """A folder in which the file is a device that is always full."""
    import tempfile

    folder = tempfile.mkdtemp()
    os.symlink("/dev/full", f"{folder}/rank-0.steps.jsonl")
    return folder


@as_ranks(1)
def test_more_steps_than_are_kept_leave_the_last_ones():
    hvd.shutdown()
    hvd.init()
    history = step_rows.History()
    for _ in range(3):
        hvd.stats_step()
    assert [step.number for step in history.steps()] == [1, 2, 3]
    for _ in range(2 * step_rows.KEPT):
        hvd.stats_step()
    kept = history.steps()
    assert [kept[0].number, kept[-1].number] == [step_rows.KEPT + 4, 2 * step_rows.KEPT + 3]
    assert [step.number for step in history.steps(kept[-1].number - 2)] == [kept[-1].number - 1, kept[-1].number]
    assert step_rows.row(1) is None and step_rows.row(10**9) is None and hvd.stats()["window"] == step_rows.KEPT


def test_of_two_optimizers_the_first_counts_until_it_stops_and_the_script_before_both():
    class Steps:
        pass

    one, two, whose = Steps(), Steps(), Whose()
    assert [whose.counts(each) for each in (one, two, one, two)] == [True, False, True, False]
    assert not any(whose.counts(two) for _ in range(IDLE_MAX - 1))
    assert whose.counts(two) and not whose.counts(one)
    del two
    assert whose.counts(one) and whose.counts(None) and not whose.counts(one)


def test_lateness_needs_steps_that_all_ranks_tell_of():
    assert (
        stragglers.judge([{1: 5}, {2: 5}]) is None and stragglers.judge([{}]) is None and stragglers.judge([]) is None
    )
    found = stragglers.judge([{1: 0, 2: 10_000_000, 3: 7}, {1: 4_000_000, 2: 10_000_000}])
    assert found[1] == {"p50_ms": 0.0, "p90_ms": 4.0, "p99_ms": 4.0, "last_share": 0.5, "steps": 2}
    assert found[0]["last_share"] == 0.0  # both at once: nobody was last
    assert [summary.percentile(list(range(1, 101)), share) for share in (50, 90, 99)] == [50, 90, 99]
    assert report_text.amount(1.5e6) == "1.5 MB" and report_text.amount(2e15) == "2000 TB"
