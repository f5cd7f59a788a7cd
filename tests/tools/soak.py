"""The soak: random collectives for a long time, and does memory stay what it is? (The ranks: tests/support/soaking.py.)

    python tests/tools/soak.py --minutes 30 --ranks 4 --seed 1

The ranks first fill what caches there are. After a warm-up of a fifth of the time, in which buffers come to their size,
a line is laid through the resident memory of each rank by least squares: it may rise by 1 MB in 10 minutes at most.
What malloc has given out and not got back is judged by its mean rise over the rounds but for a few steps: that is free
of how memory is laid out and of the machine's speed, so it tells a leak within some hundred rounds. Descriptors and
threads may not grow at all, nor may files in /dev/shm. Every result is checked by the ranks. Exits with 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

from launching import Launch  # noqa: E402  (after the path is set)

MOST_KB = 1024.0  # in
PER_S = 600.0
MOST_A_ROUND = 0.5  # kB and blocks of Python; a round is some 3 collectives
PATIENCE_S = 180.0  # beyond the time that was asked for, on a crowded machine
OPTIONS = {
    "HVDLITE_CACHE_CAPACITY": "512",  # so that slots are given up and given again
    "MALLOC_MMAP_THRESHOLD_": "262144",  # so that what arrays give back is the system's again, and can be told
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",  # what lies there ready counts as given out
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


def soaked(minutes, ranks, seed, least=0, leaky=-1):
    """Runs the job, `least` rounds or more; (exit code, what ranks and launcher said, {rank: its measurements})."""
    program = [sys.executable, "-u", SUPPORT / "soaking.py", seed, minutes * 60, least, leaky]
    with tempfile.TemporaryDirectory() as records:
        told = {**OPTIONS, "HVDLITE_TRACE_DIR": records}  # what is kept for them shall not grow, too
        with Launch("-np", ranks, *program, merged=True, cold=True, **told) as job:
            code = job.wait(minutes * 60 + PATIENCE_S)
            assert not job.left(), "the launcher has ended before its ranks"
    said, seen = [], {}
    for line in job.out.splitlines():
        _, told, measured = line.partition(':{"rank"')
        if told:
            one = json.loads('{"rank"' + measured)
            seen.setdefault(one["rank"], []).append(one)
        else:
            said.append(line)
    return code, "\n".join(said), seen


def judged(seen, warm_s, most_kb=MOST_KB, per_s=PER_S, a_round=MOST_A_ROUND):
    """(a line for each rank, what was wrong). most_kb: by how much memory may rise in per_s seconds;
    a_round: by how much what is held may, in kB of malloc and in blocks of Python."""
    lines, wrong = [], []
    for rank, all_of in sorted(seen.items()):
        warm = [one for one in all_of if one["at"] >= warm_s]
        if len(warm) < 3:
            wrong.append(f"rank {rank} has measured itself {len(warm)} times only after {warm_s:.0f} s")
            continue
        first, last = warm[0], warm[-1]
        rise = slope([(one["at"], one["rss"]) for one in warm]) * per_s
        lines.append(f"rank {rank}: {last['rounds']} rounds, {last['rss']} kB resident, {rise:+.0f} in {per_s:.0f} s")
        if rise > most_kb:
            wrong.append(f"rank {rank}: memory rises by {rise:.0f} kB in {per_s:.0f} s, {most_kb:.0f} allowed")
        for key, allowed in {"heap": a_round, "blocks": 2 * a_round}.items():  # a tuple here and there is a block
            if first[key] is None:
                continue
            grows = steady([(one["rounds"], one[key]) for one in warm])
            lines[-1] += f"; {key} {grows:+.3f} a round"
            if grows > allowed:
                wrong.append(f"rank {rank}: {key} grows by {grows:.2f} a round, {allowed} allowed")
        for key in ("fds", "threads"):
            if last[key] > first[key]:
                wrong.append(f"rank {rank}: {key} went from {first[key]} to {last[key]}")
    return lines, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    words = parser.parse_args()
    print(f"seed {words.seed}: {words.ranks} ranks for {words.minutes:g} minutes", flush=True)
    before = set(os.listdir("/dev/shm"))
    code, said, seen = soaked(words.minutes, words.ranks, words.seed)
    lines, wrong = judged(seen, words.minutes * 12)
    wrong += [f"exit code {code}:\n{said[-6000:]}"] if code or len(seen) < words.ranks else []
    wrong += [f"left in /dev/shm: {name}" for name in set(os.listdir("/dev/shm")) - before if "hvd" in name]
    print("\n".join([*lines, *(f"WRONG: {each}" for each in wrong)]), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
