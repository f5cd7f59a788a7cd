"""Does `hvd.aggregation.allreduce` give the same bits over real sockets: with loss, strangers, deaths and neighbours?

The expected bits are those of the same integers, added by the core's engine.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from launching import Launch
from ranks import EVERYTHING, as_ranks, everything

import hvdlite.numpy as hvd
from hvdlite.aggregation import Pool, operation, packet, sockets
from hvdlite.errors import HvdArgumentError, HvdInitError, HvdMismatchError, HvdStateError

KEY = "6b" * 32
COMMAND = "import sys; from hvdlite.aggregation.aggregator_main import command; sys.exit(command())"


class Process:
    """hvdlite-aggregator, on a port that is free."""

    def __init__(self, folder, *words, kind="pool", port=None):
        if port is None:
            with contextlib.closing(sockets.opened("127.0.0.1")) as probe:
                port = probe.getsockname()[1]
        self.key = os.path.join(folder, "key")
        with open(os.open(self.key, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(KEY)
        self.address = f"127.0.0.1:{port}"
        words = ["--listen", self.address, "--kind", kind, "--key", self.key, *map(str, words)]
        self.process = subprocess.Popen([sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, text=True)
        assert self.address in self.process.stdout.readline()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=30)
        return self.process.returncode, out


@contextlib.contextmanager
def aggregator(folder, *words, **more):
    """Of this job: all ranks are initialized anew with it, and again without it at the end."""
    process = Process(folder, *words, **more) if hvd.rank() == 0 else None
    address, key = hvd.broadcast_object((process.address, process.key) if process else None)
    os.environ.update(HVDLITE_AGGREGATOR=address, HVDLITE_AGGREGATOR_KEY=key)
    hvd.shutdown()
    hvd.init()
    try:
        yield process
    finally:
        del os.environ["HVDLITE_AGGREGATOR"], os.environ["HVDLITE_AGGREGATOR_KEY"]
        hvd.shutdown()
        if process is not None and process.process.returncode is None:
            code, out = process.end()
            assert code == 0 and "hvdlite-aggregator: " in out
        hvd.init()


def vector(length=40_000, seed=0):
    made = np.random.default_rng(100 * seed + hvd.rank())
    return made.standard_normal(length).astype(np.float32) * np.exp2(made.integers(-40, 40, length)).astype(np.float32)


def expected(x, process_set=hvd.global_process_set, divisor=None):
    class Connection:
        set, n = process_set, process_set.size()

    return operation._by_engine(Connection, x, f"expected.{len(x)}", divisor or process_set.size())


def lossy(part, seed):
    """Ranks lose this part of what they send, and send as much twice."""
    send, lot = sockets.send, random.Random(seed)

    def sometimes(sock, data, to=None):
        for _ in range((lot.random() >= part) + (lot.random() < part)):
            send(sock, data, to)

    return sometimes


@pytest.mark.parametrize("kind", ["pool", "hashed"])
@as_ranks(2, *everything(3, 4))
def test_sums_have_the_bits_of_the_engine_when_datagrams_are_lost(kind, tmp_path, monkeypatch):
    with aggregator(tmp_path, "--slots", 16, kind=kind):
        x = vector()
        want = expected(x)
        assert hvd.aggregation.allreduce(x.reshape(200, 200), name="whole").tobytes() == want.tobytes()
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "send", lossy(0.01, hvd.rank()))
            for _ in range(3):
                assert hvd.aggregation.allreduce(x, name="lossy").tobytes() == want.tobytes()
        assert hvd.aggregation.stats()["operations"] == {"aggregator": 4} and not hvd.aggregation.stats()["lost"]
        n = sum(range(1, hvd.size() + 1))
        whole = hvd.aggregation.allreduce(np.arange(1000, dtype=np.int32) * (hvd.rank() + 1), op=hvd.Sum)
        assert whole.dtype == np.int32 and (whole == n * np.arange(1000)).all()
        assert hvd.aggregation.allreduce(np.zeros((0, 3), np.float32)).shape == (0, 3)


@as_ranks(3)
def test_what_ranks_pass_is_compared_and_neighbours_go_by_the_engine(tmp_path):
    with aggregator(tmp_path, "--jobs", 2):
        x = vector(1000)
        with pytest.raises(HvdMismatchError, match=r"'t': rank 0 has shape \(2,\).* rank 1 has shape \(3,\).*HVD301"):
            hvd.aggregation.allreduce(np.zeros(3 if hvd.rank() else 2, np.float32), name="t")
        for wrong, op in ((np.zeros(2), hvd.Sum), (np.zeros(2, np.int32), hvd.Average), (x, hvd.Max)):
            with pytest.raises(HvdArgumentError, match="'w': the aggregator"):
                hvd.aggregation.allreduce(wrong, op=op, name="w")
        x[7] = np.nan if hvd.rank() == 1 else 1.0
        y = hvd.aggregation.allreduce(x)
        assert np.isnan(y[7]) and np.isfinite(np.delete(y, 7)).all()
        x[7] = 1.0
        for _ in range(2):  # removed, and added again
            some = hvd.add_process_set([0, 2])
            if some.included():
                assert hvd.aggregation.allreduce(x, process_set=some).tobytes() == expected(x, some).tobytes()
            hvd.remove_process_set(some)
        want = hvd.allreduce(np.where(hvd.rank() == 2, 0, x).astype(np.float32), op=hvd.Sum)
        if hvd.rank() < 2:
            assert np.allclose(hvd.aggregation.allreduce(x, op=hvd.Sum, name="j"), want)
        hvd.join()
        assert hvd.aggregation.allreduce(x).tobytes() == expected(x).tobytes()  # after join
        assert np.isnan(hvd.aggregation.allreduce(np.float32([np.nan, hvd.rank()]))[0])
        assert hvd.aggregation.stats()["operations"] == {"aggregator": 1, "not finite": 1}


@pytest.mark.parametrize("kind", ["pool", "hashed"])
@as_ranks(2)
def test_an_aggregator_killed_in_an_operation_changes_no_bit(kind, tmp_path):
    x = vector(100_000)
    want, lot = expected(x).tobytes(), random.Random(5)
    for _ in range(20 if EVERYTHING else 2):
        with aggregator(tmp_path, kind=kind) as process, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            hvd.aggregation.allreduce(x, name="first")
            if process is not None:
                threading.Timer(lot.uniform(0.0, 0.04), process.process.kill).start()
            slowest, end = 0.0, False
            while not end:
                end = hvd.allreduce(process is not None and process.process.poll() is not None, op=hvd.Max)
                began = time.monotonic()
                assert hvd.aggregation.allreduce(x, name="again").tobytes() == want
                slowest = max(slowest, time.monotonic() - began)
            stats = hvd.aggregation.stats()
            assert slowest < 10.0
            texts = [str(each.message) for each in seen]
            assert [text.endswith("without it [HVD430]") for text in texts] == [True] * (hvd.rank() == 0), texts
            if kind == "pool":
                assert "its port is closed" in stats["lost"] and stats["operations"]["engine"] > 0
            else:
                assert not stats["lost"] and "engine" not in stats["operations"] and stats["without switch"] > 0


@as_ranks(2)
def test_an_interrupted_operation_ends_on_the_others_with_the_next_call(tmp_path, monkeypatch):
    with aggregator(tmp_path):
        x, complete = vector(2000), sockets.complete
        want = expected(x).tobytes()

        def interrupted(*words):
            complete(*words)
            with pytest.raises(HvdStateError, match="another thread of this rank"):
                hvd.aggregation.allreduce(x)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if hvd.rank() == 1:
                patch.setattr(sockets, "complete", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    hvd.aggregation.allreduce(x)
            else:
                assert hvd.aggregation.allreduce(x).tobytes() == want
        assert hvd.aggregation.allreduce(x).tobytes() == want
        stats = hvd.aggregation.stats()
        assert stats["lost"] == "'unnamed' was interrupted on rank 1" and stats["operations"]["engine"] == 2


@as_ranks(2)
def test_a_stranger_changes_nothing(tmp_path, monkeypatch):
    """It sends garbage, datagrams of another key, and copies of all that this job has sent, to all ports."""
    with aggregator(tmp_path, kind="hashed"):
        x, kept, send = vector(), [], sockets.send
        want = expected(x).tobytes()

        def keeping(sock, data, to=None):
            kept.append(data)
            send(sock, data, to)

        monkeypatch.setattr(sockets, "send", keeping)
        assert hvd.aggregation.allreduce(x).tobytes() == want
        monkeypatch.setattr(sockets, "send", send)
        connection = next(iter(operation._connections.values()))
        ports = [end.getpeername() for end in connection.ends.values()]
        ports += [end.getsockname() for end in connection.ends.values()]
        assert {packet.unpack(data, connection.key).kind for data in kept} >= {packet.HELLO, packet.UPDATE}
        other = [packet.unpack(data, connection.key).pack(b"o" * 32) for data in kept[:200]]
        bye = packet.control(packet.BYE, connection.job, 2, 0).pack(b"o" * 32)
        done = threading.Event()

        def stranger():
            lot = random.Random(hvd.rank())
            with contextlib.closing(sockets.opened("127.0.0.1")) as sock:
                while not done.is_set():
                    for port in ports:
                        send(
                            sock, lot.choice([lot.choice(kept), lot.choice(other), bye, lot.randbytes(1064), b""]), port
                        )
                    time.sleep(0.0005)

        thread = threading.Thread(target=stranger)
        thread.start()
        try:
            for _ in range(3):
                assert hvd.aggregation.allreduce(x).tobytes() == want
        finally:
            done.set()
            thread.join()
        assert not hvd.aggregation.stats()["lost"]


@as_ranks(4)
def test_two_jobs_share_an_aggregator(tmp_path):
    """Disjoint process sets are two jobs to it. Shares depend on the machine: simulations test them."""
    with aggregator(tmp_path, "--slots", 8, kind="hashed"):
        sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
        mine = sets[hvd.rank() // 2]
        x = vector(seed=hvd.rank() // 2)
        want = expected(x, mine)
        for _ in range(3):
            assert hvd.aggregation.allreduce(x, process_set=mine).tobytes() == want.tobytes()


@as_ranks(3)
def test_an_aggregator_that_is_full_or_silent_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "1")
    with aggregator(tmp_path, "--jobs", 1) as process:
        hvd.aggregation.allreduce(vector(100))
        other = hvd.add_process_set([1, 0])
        if other.included():
            with pytest.raises(
                HvdInitError, match="rank 0: the aggregator at 127.* had no slots left for 1 s: start another.*HVD024"
            ):
                hvd.aggregation.allreduce(vector(100), process_set=other)
        hvd.barrier()
        hvd.shutdown()  # which gives the slots back
        hvd.init()
        assert hvd.aggregation.allreduce(vector(100)).shape == (100,)
        hvd.shutdown(), hvd.init()
        if process is not None:
            process.end(signal.SIGKILL)
        x = vector(100)
        assert hvd.aggregation.allreduce(x).tobytes() == expected(x).tobytes()  # it was there before
        assert "its port is closed" in hvd.aggregation.stats()["lost"]
        hvd.shutdown(), hvd.init()
        operation._answered.clear()  # as a new job
        with pytest.raises(HvdInitError, match=r"rank 0: the aggregator at 127.* has not answered for 1 s.*HVD024"):
            hvd.aggregation.allreduce(vector(100))
        monkeypatch.delenv("HVDLITE_AGGREGATOR")
        hvd.shutdown(), hvd.init()
        with pytest.raises(HvdInitError, match="no aggregator: start it with hvdlite-run --aggregators 1.*HVD024"):
            hvd.aggregation.allreduce(vector(100))
        os.environ["HVDLITE_AGGREGATOR"] = ""  # the end of this test removes it


def test_a_job_that_is_silent_gives_its_place_to_another(monkeypatch):
    jobs, sender = sockets.Jobs(Pool(4, jobs=1), 100), ("127.0.0.1", 9)
    hello = packet.control(packet.HELLO, 1, 2, 0, [9, 127, 0, 0, 1])
    assert jobs.greeted(hello, sender, 0.0).numbers.tolist() == [0, 4, 100]
    assert jobs.greeted(hello, ("127.0.0.2", 9), 0.0) is None  # a copy from elsewhere
    assert jobs.greeted(hello._replace(job=2), sender, 59.0).numbers.tolist() == [0, 0, 0]
    assert jobs.greeted(hello._replace(job=2), sender, 61.0).numbers.tolist() == [0, 4, 100]
    block = packet.control(packet.UPDATE, 2, 2, 0)
    assert not jobs.active(block._replace(job=1), sender, 62.0) and jobs.active(block, sender, 62.0)
    assert not jobs.active(block, ("127.0.0.1", 10), 62.0)  # another's copy
    assert jobs.greeted(hello, sender, 62.0) is None  # a copy of the greeting of a job that is over
    assert jobs.greeted(hello._replace(job=2, bits=2), sender, 62.0) is not None
    jobs.left(packet.control(packet.BYE, 2, 2, 0), 63.0)  # the other rank was killed
    assert jobs.greeted(hello._replace(job=3), sender, 67.0).numbers[1] == 0
    assert jobs.greeted(hello._replace(job=3), sender, 69.0).numbers[1] == 4


SCRIPT = """
import sys, time, numpy as np, hvdlite as hvd
hvd.init()
x = np.arange(30_000, dtype=np.float32) * (hvd.rank() + 1)
want, engine = hvd.aggregation.allreduce(x, name="x").tobytes(), 0
print("began", flush=True)
while not engine:
    assert hvd.aggregation.allreduce(x, name="x").tobytes() == want
    engine = hvd.aggregation.stats()["operations"].get("engine", 0)
hvd.shutdown(), hvd.init()
assert hvd.aggregation.allreduce(x, name="x").tobytes() == want
print("end", hvd.aggregation.stats()["lost"], flush=True)
"""


def test_a_job_of_the_launcher_survives_its_aggregator():
    with Launch("-np", 2, "--aggregators", 1, sys.executable, "-c", SCRIPT, cold=True) as job:
        job.until("began", 2)
        (mine,) = [pid for pid in job.left() if "HVDLITE_SERVER=" in open(f"/proc/{pid}/environ").read()]
        os.kill(mine, signal.SIGKILL)
        assert job.wait() == 0
        assert re.search(r"aggregator 0 \(pid \d+\) killed by SIGKILL; the ranks add without it.*HVD402", job.err)
        assert job.out.count("end it ended before the first operation") == 2
        assert len(re.findall("the aggregator is gone: .*HVD430", job.err)) >= 1
