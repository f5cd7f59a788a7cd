"""Rows a second of hvd.ps beside torch.distributed.rpc.

    hvdlite-run -np 2 python examples/benchmarks/parameter_server.py     # a minute and a half

Each rank pulls, pushes, or pulls and then pushes batches of 4,096 random ids of a table of 400,000 x 64 with Adagrad on
two servers, four under way; nobody waits for other ranks. torch's is the pattern of its tutorials: two processes hold
half of the rows each, and are called for index_select and for the same update under a lock; TensorPipe over TCP, as
ZeroMQ is. Ids of a batch are made different, and gradients of one id added up, by both. torch encrypts nothing.

All take turns in the same ranks. A figure is the median of all turns, a ratio that of the ratios within a turn.
`worker` and `server` are the share of a CPU that one of them uses; where a machine has less to give, look at rows a CPU
second.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import torch
from torch.distributed import rpc

import hvdlite as hvd
from hvdlite import ps
from measure import report

DIM, BATCH, LR, EPS, SERVERS, UNDER_WAY = 64, 4096, 0.1, 1e-10, 2, 4
PATIENCE = {"full": (400_000, 5, 0.6), "quick": (400_000, 5, 0.2), "tiny": (20_000, 1, 0.02)}  # rows, turns, seconds
KINDS = ("pull", "push", "pull, then push")


class Half:
    """What a server of torch's holds: every second row."""

    lock = threading.Lock()
    rows = state = torch.empty(0)

    @staticmethod
    def pull(ids):
        return Half.rows.index_select(0, ids)

    @staticmethod
    def push(ids, grads):
        with Half.lock:
            grads = grads / SERVERS  # the mean over the ranks, of which there are as many
            state = Half.state.index_select(0, ids).addcmul_(grads, grads)
            Half.state.index_copy_(0, ids, state)
            Half.rows.index_add_(0, ids, grads.div_(state.sqrt_().add_(EPS)), alpha=-LR)

    @staticmethod
    def cpu():
        return time.process_time()


def meet(name, rank, port):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=2 * SERVERS, rpc_backend_options=options)


def serve_torch(number, port, rows):
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # its rank has ended
    Half.rows, Half.state = torch.rand(rows // 2, DIM), torch.zeros(rows // 2, DIM)
    meet(f"server{number}", SERVERS + number, port)
    rpc.shutdown()


class Later:
    def __init__(self, wait):
        self.wait = wait


class Torchs:
    def of_server(self, some):
        return [(f"server{k}", (some % SERVERS == k).nonzero().flatten()) for k in range(SERVERS)]

    def pull(self, ids):
        some, back = torch.from_numpy(ids).unique(return_inverse=True)
        asked = [(at, rpc.rpc_async(name, Half.pull, (some[at] // SERVERS,))) for name, at in self.of_server(some)]

        def wait():
            rows = torch.empty(len(some), DIM)
            for at, future in asked:
                rows[at] = future.wait()
            return rows[back]

        return Later(wait)

    def push(self, ids, grads):
        some, back = torch.from_numpy(ids).unique(return_inverse=True)
        total = torch.zeros(len(some), DIM).index_add_(0, back, torch.from_numpy(grads))
        sent = [rpc.rpc_async(to, Half.push, (some[at] // SERVERS, total[at])) for to, at in self.of_server(some)]
        return Later(lambda: torch.futures.wait_all(sent))

    def cpu(self):
        return sum(rpc.rpc_sync(f"server{k}", Half.cpu) for k in range(SERVERS)) / SERVERS


class Ours:
    def __init__(self, rows, copies):
        self.table = ps.Table(f"{copies}", rows, DIM, ps.Adagrad(LR, EPS), None, copies, init=ps.uniform(0.01))
        self.pull, self.push = self.table.pull_async, self.table.push_async
        mine = np.arange(hvd.rank(), rows, hvd.size())
        self.table.push(mine, np.zeros((len(mine), DIM), np.float32))  # all rows are made, and their copies

    def cpu(self):
        return sum(each["cpu_s"] for each in self.table.stats()) / SERVERS


def same(ours, torchs, ids, grads):
    """Both make the same of one push to fresh tables, or they would not do the same work."""
    moved = []
    for way in (ours, torchs):
        before = way.pull(ids).wait()
        hvd.barrier()
        if hvd.rank() == 0:
            way.push(ids, grads).wait()
        hvd.barrier()
        moved.append(np.asarray(way.pull(ids).wait() - before))
    np.testing.assert_allclose(*moved, atol=1e-5)
    hvd.barrier()


def turn(way, kind, batches, grads, seconds):
    """(million rows a second of all ranks, a worker's CPU, a server's, million rows a CPU second)."""
    hvd.barrier()
    before, count, under_way = way.cpu(), 0, []
    hvd.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        ids = batches[count % len(batches)]
        if kind == KINDS[2]:
            way.pull(ids).wait()
        under_way.append(way.pull(ids) if kind == KINDS[0] else way.push(ids, grads))
        count += 1
        if len(under_way) == UNDER_WAY:
            under_way.pop(0).wait()
    for each in under_way:
        each.wait()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    hvd.barrier()
    all_of_it = np.array(hvd.allgather_object((count * BATCH / took / 1e6, cpu / took, (way.cpu() - before) / took)))
    rate, (worker, server) = all_of_it[:, 0].sum(), all_of_it[:, 1:].mean(axis=0)
    return rate, worker, server, rate / (worker * hvd.size() + server * SERVERS)


def speed(rows, turns, seconds):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = hvd.broadcast_object(free.getsockname()[1])
    words = [sys.executable, __file__, "--serve-torch", str(hvd.rank()), str(port), str(rows)]
    server = subprocess.Popen(words, stdin=subprocess.PIPE)
    meet(f"worker{hvd.rank()}", hvd.rank(), port)
    random, found = np.random.default_rng(hvd.rank()), {}
    batches = [random.integers(0, rows, BATCH) for _ in range(16)]
    grads = random.standard_normal((BATCH, DIM)).astype(np.float32)
    for _ in range(turns):
        for curve, text in (("1", "hvdlite"), ("0", "hvdlite, not encrypted")):
            hvd.shutdown()  # with it the servers
            os.environ["HVDLITE_PS_CURVE"] = curve
            hvd.init()
            ps.serve(SERVERS)
            ways = {text: Ours(rows, 1), f"{text}, 2 copies": Ours(rows, 2)}
            ways.update({"torch": Torchs()} if curve == "1" else {})
            if not found:
                same(ways[text], ways["torch"], batches[0], grads)
            for kind in KINDS:
                for name, way in ways.items():
                    found.setdefault((kind, name), []).append(turn(way, kind, batches, grads, seconds))
    rpc.shutdown()
    server.wait()
    if hvd.rank() == 0:
        print(f"{'':52}Mrows/s  x torch  worker  server  Mrows a CPU s")
        for (kind, name), figures in sorted(found.items(), key=lambda of: (KINDS.index(of[0][0]), of[0][1])):
            ratio = statistics.median(mine[0] / its[0] for mine, its in zip(figures, found[kind, "torch"]))
            rate, worker, of_server, a_cpu = (statistics.median(each) for each in zip(*figures))
            print(f"{kind:18}{name:34}{rate:7.2f}{ratio:9.2f}{worker:8.2f}{of_server:8.2f}{a_cpu:15.2f}")
        for (kind, name), figures in found.items():
            report(kind, name, "million rows/s", [each[0] for each in figures])


def main() -> None:
    if sys.argv[1:2] == ["--serve-torch"]:
        serve_torch(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description="Rows a second through tables, beside torch.distributed.rpc.")
    parser.add_argument("--patience", choices=tuple(PATIENCE), default="full")
    args = parser.parse_args()
    hvd.init()
    if hvd.size() != SERVERS:
        raise SystemExit("start two ranks: hvdlite-run -np 2")
    speed(*PATIENCE[args.patience])


if __name__ == "__main__":
    main()
