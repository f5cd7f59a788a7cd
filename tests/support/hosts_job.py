"""Ranks of one job on several hosts, started by a test: a store that all hosts reach, and a rank in each slot.

It is what a launcher over ssh will be, without ssh: it makes the environment of each rank as hvdlite-run does, starts
the ranks on their hosts, tells the store of their ends, and keeps what they say. The store stands in the network of one
host (or of the switch: then every host may die). The ranks of a host that is killed are seen to end from outside, as
an agent whose connection ends would tell it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import hosts as network
import pytest
from ranks import environment

from hvdlite.launcher.agent import rank_environment as of_ranks
from hvdlite.launcher.hosts import hosts as slots_of
from hvdlite.launcher.store import server

SECONDS = 60.0
HERE = network.HERE


class HostsJob:
    """`command` in every slot: slots=(2, 1, 3) are two ranks on nodeA, one on nodeB, three on nodeC. A context manager.

    store_on: the host whose network the store is in; None: the switch's. ipv6: the store is reached over IPv6.
    """

    def __init__(self, hosts, slots, command, store_on=0, ipv6=False, tell=True, **environ):
        self.hosts, self.command = hosts, command
        named = [slots_of.Host(network.NAMES[n], count) for n, count in enumerate(slots) if count]
        self.slots = slots_of.assign(named, sum(slots))
        self.aborts = []
        self.codes = {}  # exit codes of ranks that have ended
        self._tell = tell
        self._secret, self._number = os.urandom(32), int.from_bytes(os.urandom(8), "big")
        address = "10.77.0.1" if store_on is None else hosts.ip6(store_on) if ipv6 else hosts.ip(store_on)
        self._store = hosts.socket_on(store_on, lambda: self._open_store(address))
        self._output = [tempfile.TemporaryFile("w+", errors="replace") for _ in self.slots]
        self._stop = False
        self._orders, self._lock = [], threading.Lock()
        access = of_ranks.StoreAccess(address, self._store.address[1], self._secret, self._number)
        self.processes = [self._start(slot, access, environ) for slot in self.slots]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads += [threading.Thread(target=self._watch, args=(rank,)) for rank in range(len(self.slots))]
        for thread in self._threads:
            thread.start()

    def _open_store(self, address):
        size = len(self.slots)
        return server.StoreServer(size, self._secret, self._number, lambda *it: self.aborts.append(it), address=address)

    def _start(self, slot, access, environ):
        shared = environment(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
            OMP_NUM_THREADS="1",
            HVDLITE_START_TIMEOUT=str(SECONDS),
        )
        told = of_ranks.shared(shared, {}, access, self.slots)
        told.update(of_ranks.of_rank(slot, len(self.slots)))
        told.update(environ)
        return self.hosts.popen(
            network.NAMES.index(slot.host),
            [sys.executable, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=self._output[slot.rank],
            stderr=subprocess.STDOUT,
            env=told,
            start_new_session=True,
        )

    def _serve(self):
        while not self._stop:
            with self._lock:
                orders, self._orders = self._orders, []
            for rank, text in orders:
                self._store.rank_ended(rank, text)
            self._store.turn(0.02)

    def _watch(self, rank):
        code = self.processes[rank].wait()
        self.codes[rank] = code
        if self._tell and not self._stop:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            with self._lock:
                self._orders.append((rank, f"rank {rank} on {self.slots[rank].host} {how}"))

    def wait(self, seconds=SECONDS, ranks=None):
        """Exit codes by rank, once these ranks (all) have ended; fails the test when that takes longer."""
        until = time.monotonic() + seconds
        wanted = range(len(self.slots)) if ranks is None else ranks
        for rank in wanted:
            self._threads[1 + rank].join(max(0.0, until - time.monotonic()))
            if rank not in self.codes:
                pytest.fail(f"rank {rank} did not end within {seconds} s:\n{self.text()}", pytrace=False)
        return {rank: self.codes[rank] for rank in wanted}

    def said(self, rank):
        """What a rank has printed."""
        output = self._output[rank]
        return os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")

    def text(self):
        """What all have printed, by rank."""
        return "\n".join(f"--- rank {slot.rank} on {slot.host}\n{self.said(slot.rank)}" for slot in self.slots)[-9000:]

    def until(self, text, ranks=None, seconds=SECONDS):
        """Waits until each of these ranks (all) has said `text`."""
        end = time.monotonic() + seconds
        for rank in range(len(self.slots)) if ranks is None else ranks:
            while text not in self.said(rank):
                assert time.monotonic() < end, f"rank {rank} did not say {text!r}:\n{self.text()}"
                assert rank not in self.codes or text in self.said(rank), f"rank {rank} has ended:\n{self.text()}"
                time.sleep(0.02)

    def kill_rank(self, rank, number=signal.SIGKILL):
        """A signal to the rank's own process."""
        for pid in network._children(self.processes[rank].pid):
            os.kill(pid, number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop = True
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                with contextlib.suppress(OSError):
                    self.kill_rank(rank)
                process.kill()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank was left"
        self._store.close()
        for output in self._output:
            output.close()
