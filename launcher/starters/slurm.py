"""Slurm: one srun starts an agent on each host of the allocation.

srun is only the starter: an agent per node, whatever the number of ranks there, because srun alone gives another exit
code than the failed rank's, misses processes in sessions of their own, and copies stdin to all. Each agent reads the
job from the line that srun copies to all of them, and dials back (remote_agent.py). Which host it is on it learns from
SLURM_NODEID, so the session lists the hosts in Slurm's order.

The step shares the nodes with whatever started us (--overlap) and takes all that the job has there: ranks are to find
all CPUs and GPUs, as under `srun` of their own. Variables of the job file that would cut a step down to one task's
share are withheld from srun.

Where ranks come and go each node has an srun of its own: one for all would end, and with it all agents, when Slurm
misses one of the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..hosts import address
from .starter import Session, far_command

_WITHHELD = (
    "CPUS_PER_TASK",
    "GPUS_PER_TASK",
    "TRES_PER_TASK",
    "MEM_PER_CPU",
    "MEM_PER_GPU",
    "CPU_BIND",
    "EXACT",
    "HINT",
)
_REMEDIES = (
    (
        r"No module named '?hvdlite|cannot import name \S+ from 'hvdlite",
        "the Python there has no hvdlite: install it on all nodes",
    ),
    (r"[Ii]nvalid job id|has expired|already completing", "the allocation is over: sbatch or salloc a new one"),
    (r"node configuration is not available|More processors requested", "Slurm gives no step on it: is it in the job?"),
    (r"Unable to contact slurm controller|Socket timed out", "Slurm does not answer: does `srun hostname` work?"),
    (r"command not found|No such file", "this Python must be at the same path on all nodes"),
)


class Srun:
    """A Starter. `nodes` are those of the allocation, in Slurm's order. apart: each is to have an srun of its own."""

    def __init__(self, nodes: Sequence[str], apart: bool = False) -> None:
        self._nodes, self._apart = list(nodes), apart

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[Session]:
        """One for all of them, or one for each."""
        ordered = sorted(hosts, key=lambda each: self._nodes.index(each[1]))
        return [self._session([each]) for each in ordered] if self._apart else [self._session(ordered)]

    @staticmethod
    def _session(ordered: Sequence[tuple[int, str]]) -> Session:
        names = ",".join(name for _, name in ordered)
        words = [
            "env",
            *(word for name in _WITHHELD for each in ("SLURM", "SRUN") for word in ("-u", f"{each}_{name}")),
        ]
        words += ["srun", "--mpi=none", "--kill-on-bad-exit=1", "--overlap", "--cpu-bind=none", "--export=ALL"]
        words += [f"--nodes={len(ordered)}", f"--ntasks={len(ordered)}", "--ntasks-per-node=1", f"--nodelist={names}"]
        return Session([*words, "--distribution=block", *far_command()], [number for number, _ in ordered])

    def resolve(self, name: str) -> list[str]:
        """The addresses of a node that others know it by: on many systems a host's own name leads to itself alone."""
        found = [ip for ip in address.resolve(name) if not ip.startswith("127.") and ip != "::1"]
        if not found:
            raise address.AddressError(f"{name}: on this host the name resolves to a loopback address only [HVD712]")
        return found

    def again(self, code: int, text: str) -> bool:
        """srun tries by itself."""
        return False

    def remedy(self, host: str, code: int, text: str) -> str:
        """What the user can do, and srun's last line."""
        last = text.splitlines()[-1].strip() if text else "nothing"
        for pattern, advice in _REMEDIES:
            if re.search(pattern, text):
                return f"{advice} [{last}]"
        return f"srun ended with code {code} [{last}]"
