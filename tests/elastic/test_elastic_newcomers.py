"""What does a process see that comes into an elastic job later, and what is left of it? Its place, which is a guess
until its training function begins; its environment; its records; and what `hvdlite.run` returns of it.
"""

import json
import os
import signal
import time

import numpy as np
import pytest
from elastic_jobs import AT_ONCE, HERE, ElasticJob

import hvdlite as hvd
from hvdlite import _core
from hvdlite.trace import cli

ONES = np.ones(3, np.float32)
SET = hvd.ProcessSet([0, 1])
REFUSED = [
    lambda: hvd.alltoall(ONES),
    lambda: hvd.reducescatter(ONES),
    lambda: hvd.reduce(ONES, 0),
    lambda: hvd.send(ONES, 0),
    lambda: hvd.add_process_set([0, 1]),
    lambda: hvd.remove_process_set(SET),
    SET.size,
    SET.included,
    hvd.is_homogeneous,
    hvd.stats,
    hvd.counters,
    hvd.dump_trace,
    lambda: hvd.start_timeline("t.json"),
    hvd.stop_timeline,
    lambda: hvd.Mesh(dp=2),
]


def test_before_training_a_newcomer_communicates_with_itself_and_the_rest_raises_one_error():
    hvd.init()  # the core of its own
    _core.prepare((2, 3, 1, 2, 0, 1))
    try:
        assert hvd.is_initialized() and hvd.global_process_set.size() == 3
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (2, 3, 1, 2)
        for each in (
            hvd.allreduce,
            hvd.allgather,
            lambda x: hvd.broadcast(x, 1),
            lambda x: hvd.grouped_allreduce([x])[0],
        ):
            assert each(ONES).tolist() == ONES.tolist()
        assert hvd.broadcast_object({"a": 1}, 1) == {"a": 1} and hvd.allgather_object("b") == ["b"]
        hvd.barrier()
        assert hvd.join() == 0
        for call in REFUSED:
            with pytest.raises(hvd.HvdNotInitializedError, match=r"cannot communicate before .* begins.*\[HVD426\]$"):
                call()
    finally:
        _core.prepare(None)
        hvd.shutdown()
    with pytest.raises(hvd.HvdNotInitializedError, match="HVD101"):
        hvd.allreduce(ONES)


EARLY = """
import hvdlite as hvd, numpy as np, sys
hvd.init()
assert hvd.allreduce(np.ones(2), name="early").tolist() == [1, 1] and hvd.broadcast_object(hvd.size()) > 1
import elastic_training, json
elastic_training.main(sys.argv[1], elastic_training.Plan(**json.loads(sys.argv[2])))
"""


def test_a_newcomer_may_make_a_step_alone_before_it_joins(tmp_path):
    program = tmp_path / "early.py"
    program.write_text(EARLY)
    path = str(HERE)
    with ElasticJob(
        tmp_path, "-np", "2", "--min-np", "1", *AT_ONCE, program=str(program), plan={"epochs": 1000}, PYTHONPATH=path
    ) as job:
        job.until_training(2, 3)
        job.kill(1)
        job.until_training(1)
        job.until_training(2)
        (tmp_path / "last").touch()
        assert job.finish() == [2, 1, 2], job.out


def test_records_of_all_that_had_a_rank_are_kept(tmp_path, capsys):
    records, timeline = tmp_path / "td", tmp_path / "tl.json"
    flags = ("-np", "3", "--min-np", "1", *AT_ONCE, "--trace-dir", records, "--timeline-filename", timeline)
    with ElasticJob(tmp_path, *map(str, flags), plan={"epochs": 1000}) as job:
        job.until_training(3, 3)
        (dead,) = job.kill(2)
        job.until_training(3, 8)
        (tmp_path / "last").touch()
        job.finish()
        pids, first = set(job.pids()), job.out.count("hvdlite-run: epoch ")  # so many epochs before the last
    kept = {json.loads(path.read_text())["pid"] for path in records.glob("rank-2.*")}
    assert kept == pids - {dead} - {json.loads((records / f"rank-{n}.flight.json").read_text())["pid"] for n in (0, 1)}
    assert cli.main(["analyze", str(records), "--before", str(first)]) == 0
    assert f"Rank 2 is at fault: rank 2 (pid {dead}) is lost" in capsys.readouterr().out
    for before in (0, first):
        assert cli.main(["merge", str(timeline), "--before", str(before), "-o", str(tmp_path / "all.json")]) == 0
        merged = json.loads((tmp_path / "all.json").read_text())["otherData"]["ranks"]
        assert {each["rank"] for each in merged} == {0, 1, 2}


def told(folder, how):
    """Trains until somebody was killed and another has come; what each rank has found in its environment."""
    from hvdlite.elastic import ObjectState, run

    hvd.init()
    found = []

    @run
    def train(state):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HVDLITE_RANK", "HOROVOD_SIZE")
        place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.rank(), hvd.size()]
        found.append((hvd.size(), [int(os.environ[name]) for name in names] == place))
        while len(state.sizes) < 3 or hvd.size() < 3:
            if how == "raises" and hvd.rank() == 1:
                raise KeyError("odd")
            if hvd.rank() == 1 and not os.path.exists(f"{folder}/killed"):
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            state.sizes = [*state.sizes, hvd.size()]
            time.sleep(0.01)
            state.commit()

    train(ObjectState(hvd.broadcast_object, hvd.rank, sizes=[]))
    return hvd.rank(), found


def test_run_returns_what_the_last_ranks_return_whose_environment_was_true_in_every_epoch(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:3\n")
    script.chmod(0o755)
    words = {"min_num_proc": 2, "max_num_proc": 3, "num_proc": 3, "cooldown_range": (0, 0)}
    results = hvd.run(told, (str(tmp_path), "dies"), **words, host_discovery_script=str(script))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(true and size in (2, 3) for _, found in results for size, true in found)
    assert {len(found) for _, found in results} >= {1} and max(len(found) for _, found in results) >= 2
    with pytest.raises(hvd.HvdRunError, match=r"^rank 1 \(.*\) raised KeyError: 'odd'") as caught:
        hvd.run(told, (str(tmp_path), "raises"), min_np=2, hosts="localhost:2")
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(hvd.HvdRunError, match="--min-np 4 is more than -np 2"):
        hvd.run(told, num_proc=2, min_np=4, hosts="localhost:4")
