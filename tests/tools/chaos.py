"""Trials of chaos: jobs in which a rank ends in any way, at any moment, on any plane (tests/support/chaotic/).

    python tests/tools/chaos.py --trials 500 --seed 1       500 trials, from seed 1 on; every seed is printed
    python tests/tools/chaos.py --trials 50 --plane hier    only those on one plane: shm, p2p, hier, mpi, gpu
    python tests/tools/chaos.py --only 4711                 one trial again
    python tests/tools/chaos.py --trials 50 --late 0.2      the parent strikes so much later, as on a crowded machine;
                                                      inf: only when the victim has done all its work

Exits with 1 if anything was wrong in any of them. Each trial runs in namespaces of its own where that may be (it takes
root), so that whatever a job leaves is found; without, processes are known by a mark.
"""

from __future__ import annotations

import argparse
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

import pytest  # noqa: E402  (after the path is set)
from chaotic import left, plan  # noqa: E402

TRIAL_S = 600.0
VERDICTS = ("ok", "ok (moment passed)", "ok (moment not reached)", "WRONG", "skipped")


def unable(trial):
    """Why a trial cannot be had here, or None."""
    try:
        if trial.torch:
            import importlib.util

            if importlib.util.find_spec("torch") is None:
                return "torch is not installed"
        if trial.plane == "mpi":
            import mpis

            mpis.mpirun(trial.mpi)
        if trial.plane == "gpu":
            import gpus

            gpus.build_stub()
    except pytest.skip.Exception as skip:
        return str(skip)
    return None


def outcome(seed, late=0.0):
    """What trial.py says of a seed."""
    reason = unable(plan.planned(seed))
    if reason is not None:
        return {"seed": seed, "skipped": reason, "wrong": []}
    words = left.alone([sys.executable, str(SUPPORT / "chaotic" / "trial.py"), str(seed), str(late)])
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_S)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"seed": seed, "wrong": [f"trial.py ended with {done.returncode}"], "said": done.stderr[-4000:]}
    return json.loads(lines[-1])


def seeds(first, count, plane):
    """So many seeds from `first` on, of a plane or of any."""
    each = (seed for seed in itertools.count(first) if plane in (None, plan.planned(seed).plane))
    return list(itertools.islice(each, count))


def verdict(seen):
    """One of VERDICTS, or that it was skipped."""
    if "skipped" in seen:
        return "skipped"
    if seen["wrong"]:
        return "WRONG"
    return "ok (moment passed)" if seen["passed"] else "ok" if seen["reached"] else "ok (moment not reached)"


def table(found):
    """Lines: how many trials ended how, by plane (MPI by MPI) and by way."""
    kinds: dict[str, dict[str, int]] = {}
    for seen in found:
        trial = plan.planned(seen["seed"])
        for kind in ("all", trial.mpi if trial.plane == "mpi" else trial.plane, trial.way):
            row = kinds.setdefault(kind, dict.fromkeys(VERDICTS, 0))
            row[verdict(seen)] += 1
    order = ["all", *dict.fromkeys(plan.PLANES), *plan.MPIS, *plan.WAYS]
    heads = ("", "trials", *(each.removeprefix("ok (").rstrip(")") for each in VERDICTS))
    rows = [(kind, sum(kinds[kind].values()), *kinds[kind].values()) for kind in order if kind in kinds]
    widths = [max(map(len, column)) for column in zip(*(map(str, row) for row in (heads, *rows)))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(f"{each:>{width}}" for each, width in zip(row[1:], widths[1:]))])
        for row in (heads, *rows)
    ]


def told(seen):
    """A line on a trial, and more where something was wrong."""
    if "skipped" in seen:
        how = f"skipped: {seen['skipped']}"
    else:
        took = f"{seen.get('seconds', 0):.1f} s" + (f", ended after {seen['ending']} s" if seen.get("ending") else "")
        how = f"{verdict(seen)}  {took}"
    line = f"seed {seen['seed']:6}  {plan.planned(seen['seed'])}  {how}"
    if not seen["wrong"]:
        return line
    said = [f"    {each}" for each in seen["wrong"]] + [f"    | {each}" for each in seen.get("said", "").splitlines()]
    return "\n".join([line, *said, f"    again: python tests/tools/chaos.py --only {seen['seed']}"])


def conduct(chosen, jobs=1, say=print, late=0.0):
    """Runs these trials, so many at a time; what was seen of each. late: seconds, of the parent's strike."""
    found = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(outcome, seed, late) for seed in chosen]):
            found.append(future.result())
            say(told(found[-1]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, help="the first one; by default at random")
    parser.add_argument("--plane", choices=sorted(set(plan.PLANES)))
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--only", type=int, metavar="SEED")
    parser.add_argument("--late", type=float, default=0.0, metavar="S", help="seconds by which strikes come late")
    words = parser.parse_args()
    first = words.seed if words.seed is not None else random.randrange(10**6)
    chosen = [words.only] if words.only is not None else seeds(first, words.trials, words.plane)
    began = time.monotonic()
    found = conduct(chosen, words.jobs, lambda line: print(line, flush=True), words.late)
    wrong = sorted(seen["seed"] for seen in found if seen["wrong"])
    skipped = sum("skipped" in seen for seen in found)
    latest = max((seen["ending"] for seen in found if seen.get("ending")), default=0.0)
    alone = "in namespaces" if left.can_be_alone() else "without namespaces"
    print("\n".join(["", *table(found), ""]))
    print(
        f"{len(found) - skipped} trials {alone} in {time.monotonic() - began:.0f} s from seed {chosen[0]}: "
        f"{len(wrong)} wrong {wrong or ''}; {skipped} skipped; "
        f"{latest} s from a victim's end to the job's at most"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
