"""The soak: random collectives for a long time, and does memory stay what it is? (The ranks: tests/support/soaking.py.)

    python tests/tools/soak.py --minutes 30 --ranks 4 --seed 1

The ranks first fill what caches there are. After a warm-up, in which buffers come to their size, a line is laid through
the resident memory of each rank by least squares: it may rise by 1 MB in 10 minutes at most. What malloc has given out
and not got back is looked at, too, by its mean rise over the rounds but for a few steps: that is free of how memory is
laid out and of how fast the machine is, so it tells a leak within some hundred rounds. Descriptors and threads may not
grow at all, nor may files in /dev/shm. Every result is checked by the ranks. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "support/soaking.py"
MOST_KB = 1024.0  # in
PER_S = 600.0
MOST_A_ROUND = 0.5  # kB and blocks of Python; a round is some 3 collectives
PATIENCE_S = 180.0  # beyond the time that was asked for, on a crowded machine
OPTIONS = {
    "HVDLITE_CACHE_CAPACITY": "512",  # so that slots are given up and given again
    "MALLOC_MMAP_THRESHOLD_": "262144",  # so that what arrays give back is the system's again, and can be told
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",  # what lies there ready counts as given out
    "OMP_NUM_THREADS": "1",
}


def slope(points):
    """The rise of the line of least squares through (x, y)."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    return sum((p[0] - x) * (p[1] - y) for p in points) / (sum((p[0] - x) ** 2 for p in points) or 1.0)


def steady(points):
    """The mean rise from point to point without the steepest tenth up and down: a few steps do not count, as of a table
    that doubles."""
    steps = [(b[1] - a[1], b[0] - a[0]) for a, b in zip(points, points[1:]) if b[0] > a[0]]
    steps.sort(key=lambda step: step[0] / step[1])
    aside = max(1, len(steps) // 10) if len(steps) > 3 else 0
    steps = steps[aside : len(steps) - aside]
    return sum(rise for rise, _ in steps) / sum(run for _, run in steps) if steps else 0.0


def soaked(minutes, ranks, seed, plane=None, pace=0.0, least=0, leaky=-1):
    """Runs the job, `least` rounds or more; (exit code, what ranks and launcher said, {rank: its measurements})."""
    words = [sys.executable, "-m", "hvdlite.launcher", "-np", str(ranks)]
    words += ["--plane", plane] if plane else []
    words += [sys.executable, "-u", str(PROGRAM), str(seed)]
    words += [str(minutes * 60), str(least), str(pace), str(leaky)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=minutes * 60 + PATIENCE_S,
            env={**kept, **OPTIONS},
        )
        output.seek(0)
        lines = output.read().splitlines()
    said, seen = [], {}
    for line in lines:
        _, told, measured = line.partition(":" + '{"rank"')
        if told:
            one = json.loads('{"rank"' + measured)
            seen.setdefault(one["rank"], []).append(one)
        else:
            said.append(line)
    return done.returncode, "\n".join(said), seen


def judged(seen, warm_s, most_kb=MOST_KB, per_s=PER_S, a_round=MOST_A_ROUND):
    """({rank: figures}, what was wrong). most_kb: by how much memory may rise in per_s seconds;
    a_round: by how much what is held may, in kB of malloc and in blocks of Python."""
    figures, wrong = {}, []
    for rank, all_of in sorted(seen.items()):
        warm = [one for one in all_of if one["at"] >= warm_s]
        if len(warm) < 3:
            wrong.append(f"rank {rank} has measured itself {len(warm)} times only after {warm_s:.0f} s")
            continue
        rise = {key: slope([(one["at"], one[key]) for one in warm]) * per_s for key in ("VmRSS", "RssAnon", "RssShmem")}
        grows = {
            key: steady([(one["rounds"], one[key]) for one in warm])
            for key in ("heap", "blocks")
            if warm[0][key] is not None
        }
        held = {key: (warm[0][key], max(one[key] for one in warm), warm[-1][key]) for key in ("fds", "threads")}
        figures[rank] = {
            "rounds": warm[-1]["rounds"],
            "rss_kb": warm[-1]["VmRSS"],
            "rise_kb": rise,
            "grows": grows,
            **held,
        }
        if rise["VmRSS"] > most_kb:
            wrong.append(f"rank {rank}: memory rises by {rise['VmRSS']:.0f} kB in {per_s:.0f} s, {most_kb:.0f} allowed")
        for key, most in grows.items():
            allowed = a_round * (1 if key == "heap" else 2)  # a tuple here and there is a block
            if most > allowed:
                wrong.append(f"rank {rank}: {key} grows by {most:.2f} a round, {allowed} allowed")
        for key, (first, _, last) in held.items():
            if last > first:
                wrong.append(f"rank {rank}: {key} went from {first} to {last}")
    return figures, wrong


def shown(figures):
    """A line for each rank."""
    for rank, of in figures.items():
        rise = ", ".join(f"{key} {kb:+.0f}" for key, kb in of["rise_kb"].items())
        grows = ", ".join(f"{key} {more:+.3f}" for key, more in of["grows"].items())
        yield (
            f"rank {rank}: {of['rounds']} rounds, {of['rss_kb']} kB resident; kB in {PER_S:.0f} s: {rise}; "
            f"a round: {grows}; descriptors {of['fds']}, threads {of['threads']} (first, most, last)"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--plane", choices=("shm", "p2p"))
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of rest after each round")
    parser.add_argument("--warm", type=float, help="seconds of warm-up; by default a fifth of the time")
    parser.add_argument("--keep", help="file for all measurements")
    words = parser.parse_args()
    seed = words.seed if words.seed is not None else random.randrange(10**6)
    print(f"seed {seed}: {words.ranks} ranks for {words.minutes:g} minutes", flush=True)
    before = set(os.listdir("/dev/shm"))
    code, said, seen = soaked(words.minutes, words.ranks, seed, words.plane, words.pace)
    if words.keep:
        Path(words.keep).write_text(json.dumps(seen))
    figures, wrong = judged(seen, words.warm if words.warm is not None else words.minutes * 12)
    wrong += [f"exit code {code}:\n{said[-6000:]}"] if code or len(seen) < words.ranks else []
    wrong += [f"left in /dev/shm: {name}" for name in set(os.listdir("/dev/shm")) - before if "hvd" in name]
    print("\n".join([*shown(figures), *(f"WRONG: {each}" for each in wrong)]), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
