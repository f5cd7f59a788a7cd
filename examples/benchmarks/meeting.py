"""How long do many ranks need to meet and to agree that they are of one kind? The store and its clients, no job.

    python examples/benchmarks/meeting.py [--ranks 32 64 128 256 512] [--processes 4]

The ranks are threads of some processes on this machine, with the code that real ranks run: each connects to the store
and proves the secret, joins, brings its record (versions, agreed options, where it is), reads everyone's and compares
them, and takes part in as many allgathers as the core makes in init. They stand 8 to a host. So all ranks' work is done
by this machine's few cores, where in a job each rank has one: what a job waits for is the store's share, which is
printed beside, and the work of one rank.
"""

import argparse
import multiprocessing
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from hvdlite import config
from hvdlite.launcher.store.server import StoreServer
from hvdlite.rendezvous import bootstrap, store_client
from hvdlite.rendezvous.discovery import Place
from hvdlite.system import open_files

ROUNDS, BYTES = 8, 256  # of allgathers beside that of records
LOCALS = 8
SECRET, SECONDS = bytes(range(32)), 120.0


def be_rank(rank: int, size: int, address: "tuple[str, int]", options: "dict[str, str]") -> float:
    """A rank from its first connection to the last allgather; the seconds of processor time that it took."""
    settings = config.read(options)
    settings.values["host_id"] = str(rank // LOCALS)
    hosts = -(-size // LOCALS)
    place = Place(rank, size, rank % LOCALS, min(LOCALS, size), rank // LOCALS, hosts, "HVDLITE_ variables")
    store = store_client.connect(*address, SECRET, rank=rank, size=size, version="1", wire=1, timeout=SECONDS)
    began = time.thread_time()
    store, seats = bootstrap.meet(place, settings, "1", 1, store=store)
    assert seats.hosts == hosts
    for _ in range(ROUNDS):
        assert len(store.allgather(bytes(BYTES))) == size
    store.bye()
    return time.thread_time() - began


def be_ranks(ranks: range, size: int, address: "tuple[str, int]", done: "multiprocessing.Queue[float]") -> None:
    sys.setswitchinterval(1.0)  # or else each of a hundred threads asks for the interpreter 200 times a second
    open_files.allow(2 * len(ranks), "a process of simulated ranks", "for them")
    with ThreadPoolExecutor(len(ranks)) as pool:
        done.put(max(pool.map(lambda rank: be_rank(rank, size, address, {}), ranks)))


def measure(size: int, processes: int) -> "tuple[float, float, float]":
    """Seconds until all are done; the store's processor time; the most of one rank."""
    store = StoreServer(size, SECRET, job=1)
    done: multiprocessing.Queue[float] = multiprocessing.Queue()
    share = [range(size * k // processes, size * (k + 1) // processes) for k in range(processes)]
    crew = [multiprocessing.Process(target=be_ranks, args=(each, size, store.address, done)) for each in share if each]
    over = threading.Event()

    def serve() -> None:
        nonlocal busy
        while not over.is_set():
            store.turn(0.01)
        busy = time.thread_time()

    busy = 0.0
    began = time.perf_counter()
    for process in crew:
        process.start()
    server = threading.Thread(target=serve)
    server.start()
    try:
        most = max(done.get(timeout=SECONDS) for _ in crew)
        took = time.perf_counter() - began
    finally:
        over.set()
        server.join()
        for process in crew:
            process.terminate()
            process.join()
        store.close()
    return took, busy, most


def main() -> None:
    parser = argparse.ArgumentParser(description="The store and the agreement, of simulated ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--processes", type=int, default=2 * (os.cpu_count() or 1))
    args = parser.parse_args()
    print(f"{'ranks':>6} {'all met, s':>11} {'store, CPU s':>13} {'one rank, CPU ms':>17}   on {socket.gethostname()}")
    for size in args.ranks:
        took, busy, most = measure(size, args.processes)
        print(f"{size:6} {took:11.2f} {busy:13.2f} {1000 * most:17.1f}", flush=True)


if __name__ == "__main__":
    main()
