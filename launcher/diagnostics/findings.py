"""Findings about hosts, with remedies, from the facts of probe/host_probe.py; and the rank of a script here. Pure.

A finding is well, a warning (a job will run, but not as it could, or not everywhere) or a failure (a job will not run,
or hosts will disagree). What is alike on all hosts is one line. Every warning and failure says what to do.

No threshold here is a law: they stand at the top, each where users of such launchers were known to run into trouble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite import config
from hvdlite.errors import HvdInitError
from hvdlite.rendezvous import discovery
from hvdlite.security import job_secret

WELL, WARNING, FAILURE = "ok", "warn", "FAIL"
SHARED_MIN = 256 << 20
FILES_OF_RANK, FILES_REST = 24, 256
PORTS_MIN = 1000
SKEW_S = 1.0

Facts = Mapping[str, Mapping[str, Any]]


class Finding(NamedTuple):
    """One line of the doctor's."""

    grade: str
    where: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.grade:5}{self.where}: {self.text}" + (f". Fix: {self.fix}" if self.fix else "")


def of_facts(facts: Facts, slots: Mapping[str, int]) -> list[Finding]:
    """All that follows from facts alone. slots: ranks of each host."""
    found = _alike(facts, "Python", lambda f: f["python"].rpartition(".")[0], _python_fix, lambda f: f["python"])
    found += _alike(facts, "hvdlite", lambda f: f["hvdlite"], lambda best: f"pip install hvdlite=={best}")
    for host, each in facts.items():
        if each["core"] is not None:
            found.append(Finding(FAILURE, host, f"the compiled core: {each['core']}", "pip install hvdlite again"))
    for title in dict.fromkeys(title for each in facts.values() for title in each["frameworks"]):
        if any(each["frameworks"].get(title) for each in facts.values()):
            found += _alike(facts, title, lambda f, t=title: f["frameworks"].get(t), lambda v, t=title: _install(t, v))
    found += _gpus(facts)
    for kind in ("MPI", "NCCL"):
        found += _libraries(facts, kind)
    for host, each in facts.items():
        found += _limits(host, each, slots.get(host, 1))
    return found


def _python_fix(best: str) -> str:
    return f"install Python {best} at the same path on all hosts"


def _install(title: str, version: str) -> str:
    package = {"PyTorch": "torch"}.get(title, title.lower())
    return f"pip install {package}=={version}"


def _alike(facts: Facts, title: str, key: Any, fix: Any, shown: Any = None) -> list[Finding]:
    """One line where all hosts have the same; else one for each host that differs from most."""
    values = {host: key(each) for host, each in facts.items()}
    kinds = list(values.values())
    most = max(dict.fromkeys(kinds), key=lambda value: (kinds.count(value), value is not None))
    if most is None:
        most = next(value for value in kinds if value is not None)
    odd = [host for host, value in values.items() if value != most]
    where = _together([host for host in facts if host not in odd], facts)
    example = next(each for host, each in facts.items() if host not in odd)
    found = [Finding(WELL, where, f"{title} {(shown or key)(example)}")]
    for host in odd:
        has = f"{title} {values[host]}" if values[host] is not None else f"no {title}"
        found.append(Finding(FAILURE, host, f"{has}, where other hosts have {most}", fix(most)))
    return found


def _together(hosts: Sequence[str], of: Facts) -> str:
    if len(hosts) == len(of) and len(of) > 1:
        return f"all {len(of)} hosts"
    return ", ".join(hosts)


def _gpus(facts: Facts) -> list[Finding]:
    counts = {host: (len(each["gpus"]), each["gpus"][0] if each["gpus"] else "") for host, each in facts.items()}
    if len(set(counts.values())) == 1:
        number, model = next(iter(counts.values()))
        text = f"{number} GPU{'s' if number > 1 else ''} ({model})" if number else "no GPU: only tensors on the CPU"
        found = [Finding(WELL, _together(list(facts), facts), text)]
    else:
        text = "hosts differ in GPUs: " + ", ".join(
            f"{host} {n} {model}".strip() for host, (n, model) in counts.items()
        )
        fix = "use hosts with the same devices, or check the driver (nvidia-smi)"
        found = [Finding(WARNING, _together(list(facts), facts), text, fix)]
    for host, each in facts.items():
        if each["gpus"] and each["libraries"]["NCCL"] is None:
            fix = "pip install nvidia-nccl-cu12, or a PyTorch with CUDA"
            found.append(Finding(WARNING, host, "GPUs, but no NCCL: their tensors go through host memory", fix))
    return found


def _libraries(facts: Facts, kind: str) -> list[Finding]:
    values = {host: each["libraries"][kind] for host, each in facts.items()}
    if len(set(values.values())) == 1:
        found = next(iter(values.values()))
        use = "needed for --mpi and mpirun only" if kind == "MPI" else "needed for GPUs only"
        return [Finding(WELL, _together(list(facts), facts), found or f"no {kind} ({use})")]
    text = f"hosts differ in {kind}: " + ", ".join(f"{host}: {value or 'none'}" for host, value in values.items())
    return [Finding(WARNING, _together(list(facts), facts), text, f"install the same {kind} on all hosts")]


def _limits(host: str, facts: Mapping[str, Any], slots: int) -> list[Finding]:
    """What a host's kernel allows."""
    found = []
    shm = facts["shm"]
    if shm is None:
        fix = "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        found.append(Finding(WARNING, host, "/dev/shm cannot be written: data loaders with workers need it", fix))
    elif shm[1] < SHARED_MIN:
        text = f"/dev/shm has {shm[1] >> 20} MB free of {shm[0] >> 20}: too little for data loaders with workers"
        fix = "docker run --shm-size=2g (or --ipc=host); mount -o remount,size=2g /dev/shm; remove old files there"
        found.append(Finding(WARNING, host, text, fix))
    need = FILES_REST + FILES_OF_RANK * slots
    soft, hard = facts["files"]
    if 0 <= soft < need:
        limit = f"ulimit -n {need}" if hard < 0 or hard >= need else f"nofile {need} in limits.conf (hard limit {hard})"
        found.append(Finding(FAILURE, host, f"open files: {soft}; {slots} ranks may need {need}", limit))
    if facts["ports"] < PORTS_MIN:
        fix = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        found.append(Finding(WARNING, host, f"only {facts['ports']} free ports", fix))
    if facts["cpus"] < slots:
        fix = f"-H {host}:{facts['cpus']}, or OMP_NUM_THREADS=1 and longer steps"
        found.append(Finding(WARNING, host, f"{facts['cpus']} CPUs for {slots} ranks", fix))
    if not found:
        shared = f"/dev/shm {shm[0] >> 20} MB" if shm else ""
        found.append(
            Finding(WELL, host, f"{facts['cpus']} CPUs, {shared}, {soft} open files, {facts['ports']} free ports")
        )
    return found


def of_rank(environ: Mapping[str, str]) -> list[Finding]:
    """Which rank a script would be that is started in this environment, without hvdlite-run."""
    script = "python train.py here"
    try:
        own, values = discovery.discover(environ), config.read(environ).values
    except HvdInitError as error:
        return [Finding(FAILURE, script, f"init() would raise: {error}")]
    index = environ.get("JOB_COMPLETION_INDEX")
    if own == discovery.SINGLE and index is not None and (index != "0" or job_secret.POD in environ):
        text = f"a job of one rank, though JOB_COMPLETION_INDEX={index} is set: n pods would be n jobs of one"
        fix = "set HVDLITE_SIZE to the number of pods, and HVDLITE_STORE_ADDR to the host of rank 0, in all pods"
        return [Finding(WARNING, script, text, fix)]
    if own == discovery.SINGLE:
        return [Finding(WELL, script, "a job of one rank: no launcher's variables are set")]
    text = f"would be rank {own.rank} of {own.size}: {discovery.described(own, environ)}"
    if own.size > 1 and own.source == discovery.OWN and values["store_addr"] is None:
        fix = "set HVDLITE_STORE_ADDR to the host of rank 0 on all ranks, or start the job with hvdlite-run"
        return [Finding(FAILURE, script, f"{text}, but the address of the rendezvous is missing", fix)]
    found = [Finding(WELL, script, text)]
    by_store = own.source in (discovery.OWN, discovery.BY_HAND, "torchrun")  # and over no MPI, which needs no secret
    if own.size > 1 and by_store and job_secret.POD in environ and not (values["secret_key"] or values["secret_file"]):
        text = "no HVDLITE_SECRET_KEY is set, and each pod would make a key of its own"
        found.append(Finding(WARNING, script, text, job_secret.giving(environ)))
    return found


def of_clocks(skews: Mapping[str, float]) -> list[Finding]:
    """Seconds by which clocks of other hosts are ahead of the doctor's."""
    wrong = {host: skew for host, skew in skews.items() if abs(skew) >= SKEW_S}
    fix = "run a time service there (chronyd, systemd-timesyncd)"
    found = [
        Finding(WARNING, host, f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}", fix)
        for host, skew in wrong.items()
    ]
    if skews and not wrong:
        found.append(Finding(WELL, "clocks", f"within {max(map(abs, skews.values())) * 1000:.0f} ms of this host's"))
    return found


def of_ways(ways: Mapping[tuple[str, str], str | None]) -> list[Finding]:
    """Connections tried from each host to each other: why not, or None."""
    closed = {pair: why for pair, why in ways.items() if why is not None}
    fix = "open TCP between these hosts, all ports (firewall, security group), or name the network they share with "
    fix += "--network-interface"
    found = [Finding(FAILURE, a, f"does not reach {b}: {why}", fix) for (a, b), why in closed.items()]
    if ways and not closed:
        found.append(Finding(WELL, "routes", f"every host reaches every other ({len(ways)} ways)"))
    return found


def of_speeds(speeds: Mapping[tuple[str, str], Sequence[float] | str]) -> list[Finding]:
    """(latency in seconds, bytes per second) between hosts; the slowest is pointed at where it is far behind."""
    found = []
    good = {pair: each for pair, each in speeds.items() if not isinstance(each, str)}
    best = max((each[1] for each in good.values()), default=0.0)
    for (a, b), each in speeds.items():
        if isinstance(each, str):
            found.append(Finding(FAILURE, f"{a} to {b}", f"cannot be measured: {each}", "see the routes above"))
            continue
        text = f"{each[0] * 1e6:.0f} us one way, {each[1] / 1e6:.0f} MB/s ({each[1] * 8 / 1e9:.2f} Gbit/s)"
        slow = each[1] < best / 4
        fix = "check its cable and network, which are slower than the others, or leave the host out" if slow else ""
        found.append(Finding(WARNING if slow else WELL, f"{a} to {b}", text, fix))
    return found
