"""Prediction of a step: `load(folder).step(ranks=64)` gives a time with a range, and its grounds.

A prediction names what it assumes and what was not measured, in `notes`: they decide its confidence. "high": the same
medium as recorded, at most eight times the ranks, nothing assumed; "low": something was not measured at all; else
"medium".

The range says: nine of ten runs of such a job have their mean step in it. It is as wide as these together (the root of
the sum of squares): what the step becomes when stretches of the recording are drawn again, and as much for the run to
come; what runs of one job differ by; how far recorded buckets lie from the fitted line, on more ranks than recorded;
25 % of a link that is only stated; 15 % of the step where more ranks share processors than recorded, 10 % for each
thing that was not measured; half of what recorded steps differ by, where that is more than 20 %.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..plan.units import link as read_link
from .fit import Fit, fit
from .network_model import AGGREGATOR, CODINGS, MEDIA, Cluster, Cost, cost, crowd, of_plan, stretch_of
from .recording import Recording, RecordingError
from .recording import load as read
from .step_simulation import GONE, NOT_OVERLAPPED, Played, Setting, drawn_again, play

WIRES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, **dict.fromkeys(CODINGS, 1.0)}  # codings: smaller between hosts alone
RANKS_MAX = SYNC_MAX = 10_000
FAR = 8  # times the recorded ranks
FEW = 20  # steps
AGAIN = 12  # times that the recording is drawn again, and so many steps are played each time
AGAIN_STEPS = 50
SURE = 1.645  # standard deviations, for nine of ten
RUNS = 0.02  # of a step: the standard deviation of runs of one job on a quiet machine
STATED_LINK, UNMEASURED = 0.25, 0.1
SHARED = 0.15  # how unsure is what ranks that share processors lose


@dataclass(frozen=True)
class Prediction:
    """A predicted step. ``Job.step`` makes it.

    Attributes:
        ms (float): the duration in milliseconds, as are all fields whose name ends with ``_ms``.
        low, high (float): nine of ten runs of such a job have their mean step between them, when steps of more than
            twice the median are left out.
        exposed_ms (float): the part in which ranks wait for gradients.
        late_ms (float): of that, the wait for the last rank.
        bytes_ms (float): how much shorter the step would be if bytes cost nothing.
        alone_ms (float): the duration without communication.
        confidence (str): ``high``, ``medium`` or ``low``.
        notes (list of str): what is assumed and what was not measured.
        sync_every (int): the steps that share one exchange; times are of the mean step.

    Example:
        ::

            found = job.step(ranks=8)
            print(found.ms, found.low, found.high, found.notes)
    """

    ranks: int
    ms: float
    low: float
    high: float
    exposed_ms: float
    late_ms: float
    bytes_ms: float
    alone_ms: float
    medium: str
    hosts: int
    cores: int
    fusion_mb: float
    wire: str
    batch: float
    link: str | None
    plan: str | None
    confidence: str
    notes: list[str] = field(default_factory=list)
    sync_every: int = 1

    @property
    def efficiency(self) -> float:
        """Of n times one rank's work in the same time; with a batch that stays the same on each rank."""
        return self.alone_ms / self.ms if self.ms else 0.0

    @property
    def bound(self) -> str:
        """What decides how long the step is."""
        if self.exposed_ms < 0.05 * self.ms:
            return "computing"
        if self.late_ms > 0.5 * self.exposed_ms:
            return "late ranks"
        return "bytes" if self.bytes_ms > 0.5 * self.exposed_ms else "latency"


class Job:
    """A recording, ready to be played at other sizes. ``load`` makes it.

    Args:
        recording (Recording): a small job.
        alone (Recording, optional): a job of one rank, whose computing times are used instead.

    Example:
        ::

            job = predict.load("DIR")
            job.step(ranks=64, hosts=8, link="25gbit,20us", wire="fp16").ms
    """

    def __init__(self, recording: Recording, alone: Recording | None = None) -> None:
        self.recording, self.fit = recording, fit(recording.buckets)
        self._plans: dict[tuple[str, Cluster, tuple[float, float]], Cost] = {}
        self.computing = recording if alone is None else _of_alone(recording, alone)
        self._unsteady = [each for each in (recording, alone) if each is not None and each.unsteady]

    def step(
        self, ranks: int, *, hosts: int | None = None, link: str | None = None, medium: str | None = None,
        cores: int | None = None, plan: str | None = None, fusion_mb: float | None = None, wire: str = "none",
        batch: float = 1.0, seed: int = 0, sync_every: int = 1
    ) -> Prediction:  # fmt: skip
        """Predict one training step at another size.

        Args:
            ranks (int): the number of ranks.
            hosts (int, optional): at most this many hosts share the ranks equally. None: as recorded.
            link (str, optional): rate and latency between hosts, such as ``"25gbit,20us"``. None: the recorded link.
            medium (str, optional): ``"own"`` (a wire for each host), ``"bus"`` or ``"shm"``. None: derived from the
                hosts.
            cores (int, optional): processors of each host. None: as recorded.
            plan (str, optional): an algorithm or a file of hvdlite-plan. It needs ``link``.
            fusion_mb (float, optional): the fusion threshold in MB. None: as recorded.
            wire (str): the compression: ``"none"`` (default), ``"fp16"``, ``"bf16"``, ``"int8"`` or ``"int4"``. The
                last two change only what travels between hosts.
            batch (float): the batch as a multiple of the recorded one. Default: 1.0.
            seed (int): the seed of the draws. Default: 0.
            sync_every (int): the steps that a rank takes on its own before all ranks exchange, as with
                ``hvd.DiLoCo``. Ranks wait for that exchange. Default: 1, an exchange in each step.

        Returns:
            Prediction: times in milliseconds.

        Raises:
            PlanError: ``plan`` is not valid.
            RecordingError: the recording lacks what the question needs.
            ValueError: an argument is not valid.
        """
        rec, notes = self.recording, [self.fit.note] if self.fit.note else []
        wires = _checked(ranks, wire, batch, fusion_mb, sync_every)
        ranks, rest = divmod(ranks, rec.of_copy)
        if rest:
            raise ValueError(
                f"{ranks * rec.of_copy + rest} ranks: a copy of the recorded model has {rec.of_copy}, pass a multiple "
                "of it [HVD008]"
            )
        if rec.of_copy > 1:
            notes.append(f"what the {rec.of_copy} ranks of a copy do among themselves is taken to last as recorded")
        cluster, was, assumed = self._clusters(ranks, hosts, medium, cores, link is not None)
        notes += assumed + [
            f"{each.folder}: recorded steps differ by {each.unsteady:.0%} (from the 10th to the 90th percentile): "
            "record more steps, on a machine without other work"
            for each in self._unsteady
        ]
        wire_link = None if link is None else read_link(link)
        fusion = rec.fusion if fusion_mb is None else fusion_mb * (1 << 20)
        far = self._cost(cluster, was, wire_link, plan, wire)
        stretch = stretch_of(cluster, was, self.computing.cpu)
        setting = Setting(fusion, stretch, batch, wires, cluster.hosts > 1, sync_every)
        setting_alone = Setting(fusion, 1.0, batch, wires, sync_every=sync_every)
        foreign = link is not None and was.medium == "shm"  # its scatter is not that of a network
        whole = play(self.computing, ranks, far, None if foreign else self.fit, setting, seed=seed)
        alone = play(self.computing, 1, lambda size: 0.0, None, setting_alone, 100, seed)
        nothing = far(0.0)
        free = play(self.computing, ranks, lambda size: nothing, None, setting, 50, seed)
        unmeasured = self._unmeasured(cluster, was, link, plan, batch, stretch)
        if sync_every > 1 and ranks > 1:
            notes.append(NOT_OVERLAPPED)
            unmeasured += [GONE] if len(rec.phases) > 1 else []
        if wire in CODINGS and cluster.hosts > 1:
            taken = CODINGS[wire].each
            unmeasured.append(f"{wire} is taken to need {taken:g} ns for each byte of float32: not measured")
        elif wire in CODINGS and ranks > 1:
            notes.append(f"{wire} changes nothing on one host: tensors travel as they are")
        is_stated = link is not None and ranks > 1
        unsteady = max((each.unsteady for each in self._unsteady), default=0.0) / 2  # a run may be slow all the time
        shared = stretch > 1
        others = UNMEASURED * math.sqrt(len(unmeasured) - is_stated - shared)
        guessed = math.hypot(unsteady, SHARED * shared, others)
        off = STATED_LINK if is_stated else self.fit.off if ranks > rec.size else 0.0
        low, high = self._range(ranks, far, None if foreign else self.fit, setting, whole.step, off, guessed, seed)
        ms = whole.step / 1e6
        return Prediction(
            ranks * rec.of_copy, ms, low / 1e6, high / 1e6, whole.exposed / 1e6, whole.late / 1e6,
            max(0.0, ms - free.step / 1e6), alone.step / 1e6, cluster.medium, cluster.hosts, cluster.cores,
            fusion / (1 << 20), wire, batch, link, plan, self._confidence(cluster, notes, unmeasured),
            notes + unmeasured, sync_every,
        )  # fmt: skip

    def picture(self, prediction: Prediction, seed: int = 0) -> Played:
        """Play the first steps of a prediction, for a timeline.

        Args:
            prediction (Prediction): the value of ``step``.
            seed (int): the seed of the draws. Default: 0.

        Returns:
            Played: the events.
        """
        p = prediction
        ranks = p.ranks // self.recording.of_copy
        cluster, was, _ = self._clusters(ranks, p.hosts, p.medium, p.cores, p.link is not None)
        link = None if p.link is None else read_link(p.link)
        stretch = stretch_of(cluster, was, self.computing.cpu)
        setting = Setting(p.fusion_mb * (1 << 20), stretch, p.batch, WIRES[p.wire], cluster.hosts > 1, p.sync_every)
        far = self._cost(cluster, was, link, p.plan, p.wire)
        return play(self.computing, ranks, far, self.fit, setting, 5, seed, picture=True)

    def _clusters(
        self, ranks: int, hosts: int | None, medium: str | None, cores: int | None, link: bool
    ) -> tuple[Cluster, Cluster, list[str]]:
        """Where the predicted ranks are, where the recorded ones were, and what of it is assumed."""
        rec = self.recording
        then = "shm" if rec.hosts == 1 else "bus" if medium == "bus" else "own"
        was = Cluster(rec.size, rec.hosts, rec.cores, then, rec.of_copy)
        if hosts is None:
            wires = link or medium in ("own", "bus")
            hosts = -(-ranks // rec.local_size) if rec.hosts > 1 else ranks if wires else 1
        if hosts < 1:
            raise ValueError(f"{hosts} hosts: the number must be at least 1 [HVD008]")
        hosts = next(each for each in range(min(hosts, ranks), 0, -1) if ranks % each == 0)
        if link and hosts == 1 < ranks:
            raise ValueError(
                "a link connects hosts, but these ranks are all on one: leave out the link, or pass hosts [HVD008]"
            )
        if medium not in (None, *MEDIA) or (medium == "shm") != (hosts == 1) and medium is not None and ranks > 1:
            raise ValueError(
                f"medium {medium!r} does not support {hosts} hosts: use shm for one host, own or bus for several "
                "[HVD008]"
            )
        if hosts > 1 and rec.hosts == 1 and not link:
            raise RecordingError(
                f"{rec.folder}: recorded on one host, without data about the network: pass the network between "
                "hosts, such as --link 25gbit,20us, or record on two hosts [HVD007]"
            )
        if hosts == 1 and rec.hosts > 1 and ranks > 1:
            raise RecordingError(
                f"{rec.folder}: recorded on {rec.hosts} hosts of one rank, without data about shared memory: record "
                "two ranks on one host [HVD007]"
            )
        notes = []
        if hosts > 1 and medium is None and ranks > 2:
            notes.append("each host is taken to have a wire of its own (--medium bus: one medium for all)")
        if cores is not None and not 1 <= cores <= 1 << 16:
            raise ValueError(f"{cores!r} processors of a host: the number must be at least 1 [HVD008]")
        over = "shm" if hosts == 1 else medium or "own"
        return Cluster(ranks, hosts, cores or rec.cores, over, rec.of_copy), was, notes

    def _cost(
        self, cluster: Cluster, was: Cluster, link: tuple[float, float] | None, plan: str | None, wire: str
    ) -> Cost:
        if plan is None:
            agreement = float(self.recording.rounds[:, 0].mean())
            return cost(self.fit, was, cluster, link, CODINGS.get(wire), agreement)
        if wire in CODINGS:
            raise ValueError(f"{wire} travels by alltoall and allgather, not by plan {plan!r}: leave out one [HVD008]")
        if plan == AGGREGATOR and WIRES[wire] != 1:
            raise ValueError(f"plan {plan!r} sends integers of 32 bits, {wire} saves no bytes: leave out one [HVD008]")
        if link is None:
            raise ValueError("a plan is simulated on links: pass them, such as --link 25gbit,20us [HVD008]")
        if (plan, cluster, link) not in self._plans:
            self._plans[plan, cluster, link] = of_plan(plan, cluster, link, float(self.recording.bytes.sum()))
        return self._plans[plan, cluster, link]

    def _range(
        self, ranks: int, far: Cost, fitted: Fit | None, setting: Setting, step: float, off: float, guessed: float,
        seed: int
    ) -> tuple[float, float]:  # fmt: skip
        """ns, about `step`. off: of the time of a bucket; guessed: of the step."""
        chance, steps = random.Random(seed), []
        for _ in range(AGAIN):
            rec, of = drawn_again(self.computing, fitted, chance)
            steps.append(play(rec, ranks, far, of, setting, AGAIN_STEPS, chance.randrange(1 << 30)).step)
        within = SURE * math.hypot(RUNS, math.sqrt(2) * float(np.std(steps, ddof=1)) / step)
        ends = [step, step]
        if off and ranks > 1:
            costs = [partial(_times, far, slower) for slower in (1 / (1 + off), 1 + off)]
            ends = [play(self.computing, ranks, each, fitted, setting, seed=seed).step for each in costs]
        low, high = (math.hypot(within, guessed, math.log(end / step)) for end in ends)
        return step * math.exp(-low), step * math.exp(high)

    def _unmeasured(
        self, cluster: Cluster, was: Cluster, link: str | None, plan: str | None, batch: float, stretch: float
    ) -> list[str]:
        rec, found = self.recording, []
        now, before = crowd(cluster, cluster.each), crowd(was, was.each)
        if now > before and (cluster.medium == "shm" or stretch > 1):
            found.append(
                f"{cluster.ranks * cluster.each // cluster.hosts} ranks on {cluster.cores} processors of a host: more "
                "ranks than processors: not measured"
            )
        if now < before:
            found.append(
                f"the recorded ranks had {was.cores} processors of a host, fewer than ranks: how much faster fewer "
                "ranks are was not measured"
            )
        if link is not None and cluster.ranks > 1:
            found.append(f"the network {link} was not measured: its figures are taken as given, the range as 25 % off")
        if cluster.hosts not in (1, cluster.ranks) and was.hosts > 1:
            found.append("what ranks of one host do among themselves was not measured")
        if plan is not None and cluster.ranks > 1:
            needs = ": it needs a switch that adds" if plan == AGGREGATOR else ""
            found.append(f"the algorithm {plan} was simulated, not measured{needs}")
        if batch != 1:
            found.append("computing is taken as linear in the batch: not measured")
        if cluster.ranks > 1:
            found += rec.doubts
        if rec.size == 1 and cluster.ranks > 1 and (link is None or not rec.names):
            raise RecordingError(
                f"{rec.folder}: recorded on one rank, without data about communication: record two ranks, or pass "
                "the network with --link [HVD007]"
            )
        return found

    def _confidence(self, cluster: Cluster, notes: list[str], unmeasured: list[str]) -> str:
        if unmeasured:
            return "low"
        far = cluster.ranks > FAR * self.recording.size or len(self.recording.step_ns) < FEW
        return "medium" if notes or far else "high"


def load(folder: str | os.PathLike[str], alone: str | os.PathLike[str] | None = None) -> Job:
    """Load the recording of a small job, made by ``hvdlite-run --record DIR``.

    Args:
        folder (str or path): the folder of the recording.
        alone (str or path, optional): a recording of one rank, whose computing times are used instead. Ranks on one
            host slow each other down, which a larger job on more hosts would not do.

    Returns:
        Job: for ``step``.

    Raises:
        RecordingError: a folder is not a usable recording.

    Example:
        >>> from hvdlite import predict
        >>> predict.load("DIR").step(ranks=64, hosts=8, link="25gbit,20us").ms  # doctest: +SKIP
        >>> # skipped in tests: it needs a recording
    """
    return Job(read(folder), None if alone is None else read(alone))


def _of_alone(rec: Recording, alone: Recording) -> Recording:
    """rec with the computing of `alone`."""
    if alone.size != 1:
        raise RecordingError(
            f"{alone.folder}: the second recording must be of computation alone: record it on 1 rank [HVD007]"
        )
    if not alone.names:  # an optimizer of one rank submits nothing: the shape is rec's, the durations are the other's
        ready, tail = rec.ready.mean(0), float(rec.tail.mean())
        scale = alone.tail / max(float(ready.max()) + tail, 1.0)
        return replace(rec, together=1, ready=np.outer(scale, ready), tail=scale * tail, cpu=alone.cpu)
    index = {name: i for i, name in enumerate(alone.names)}
    lacks = [name for name in rec.names if name not in index]
    if lacks:
        raise RecordingError(f"{alone.folder}: it has no gradient {lacks[0]!r}, which {rec.folder} has [HVD007]")
    return replace(
        rec, together=1, ready=alone.ready[:, [index[name] for name in rec.names]], tail=alone.tail, cpu=alone.cpu
    )


def _times(far: Cost, slower: float, size: float) -> float:
    return far(size) * slower


def _checked(ranks: int, wire: str, batch: float, fusion_mb: float | None, sync_every: int) -> float:
    """Bytes on the wire for each of a gradient. Raises ValueError."""
    for what, given, most in (("ranks", ranks, RANKS_MAX), ("sync_every", sync_every, SYNC_MAX)):
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
            raise ValueError(f"{what} must be a whole number from 1 to {most}, not {given!r} [HVD008]")
    if wire not in WIRES:
        raise ValueError(f"wire {wire!r} cannot be predicted: choose from {', '.join(WIRES)} [HVD008]")
    if not 0 < batch < 1e6:
        raise ValueError(
            f"a batch of {batch!r} times the recorded one is invalid: the factor must be above zero [HVD008]"
        )
    if fusion_mb is not None and not 0 <= fusion_mb < 1e6:
        raise ValueError(f"a fusion threshold of {fusion_mb!r} MB is invalid [HVD008]")
    return WIRES[wire]
