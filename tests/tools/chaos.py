"""Trials of chaos: jobs in which a rank ends in any way, at any moment, on any plane (tests/support/chaotic/).

    python tests/tools/chaos.py --trials 500 --seed 1       500 trials, from seed 1 on; every seed is printed
    python tests/tools/chaos.py --trials 50 --plane hier    only those on one plane: shm, p2p, hier, mpi, gpu
    python tests/tools/chaos.py --only 4711                 one trial again

Exits with 1 if anything was wrong in any of them. Each trial runs in namespaces of its own where that may be (it takes
root), so that whatever a job leaves is found; without, processes are known by a mark.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

import mpis  # noqa: E402  (after the path is set)
import pytest  # noqa: E402
import ranks  # noqa: E402
from chaotic import left, plan  # noqa: E402

TRIAL_S = 600.0


def outcome(seed, late=0.0):
    """What trial.py says of a seed, or why the trial cannot be had here."""
    trial = plan.planned(seed)
    try:
        if trial.torch:
            ranks.needs("torch")
        if trial.plane == "mpi":
            mpis.mpirun(trial.mpi)
        if trial.plane == "gpu":
            import gpus  # imports torch

            gpus.build_stub()
    except pytest.skip.Exception as skip:
        return {"seed": seed, "verdict": f"skipped: {skip}", "wrong": []}
    words = left.alone([sys.executable, str(SUPPORT / "chaotic" / "trial.py"), str(seed), str(late)])
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_S)
    if done.returncode or not done.stdout:
        wrong = [f"trial.py ended with {done.returncode}"]
        return {"seed": seed, "verdict": "WRONG", "wrong": wrong, "said": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


def told(seen):
    """A line on a trial, and more where something was wrong."""
    took = f"  {seen['seconds']} s, ended after {seen['ending']} s" if "ending" in seen else ""
    lines = [f"seed {seen['seed']:6}  {plan.planned(seen['seed'])}  {seen['verdict']}{took}"]
    if seen["wrong"]:
        lines += [f"    {each}" for each in seen["wrong"]] + [f"    | {each}" for each in seen["said"].splitlines()]
        lines.append(f"    again: python tests/tools/chaos.py --only {seen['seed']}")
    return "\n".join(lines)


def conduct(chosen, jobs=1, late=0.0):
    """Runs these trials, so many at a time, and prints each; what was seen of them. late: seconds, of the parent's
    strike, as on a crowded machine; inf: only when the victim has done all its work."""
    found = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(outcome, seed, late) for seed in chosen]):
            found.append(future.result())
            print(told(found[-1]), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the first one; by default at random")
    parser.add_argument("--plane", choices=sorted(set(plan.PLANES)))
    parser.add_argument("--only", type=int, metavar="SEED")
    words = parser.parse_args()
    met = (seed for seed in itertools.count(words.seed) if words.plane in (None, plan.planned(seed).plane))
    began = time.monotonic()
    found = conduct([words.only] if words.only is not None else itertools.islice(met, words.trials))
    counts = collections.Counter(seen["verdict"].partition(":")[0] for seen in found)
    latest = max((seen.get("ending") or 0.0 for seen in found), default=0.0)
    print(
        f"\n{len(found)} trials {'in' if left.can_be_alone() else 'without'} namespaces "
        f"in {time.monotonic() - began:.0f} s: {', '.join(f'{number} {each}' for each, number in counts.items())}; "
        f"{latest} s from a victim's end to the job's at most"
    )
    sys.exit(any(seen["wrong"] for seen in found))


if __name__ == "__main__":
    main()
