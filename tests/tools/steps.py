"""What a check consists of, in which order, and how it went: tests/run calls this in the environment that it has made.

    tests/run                   the check of a commit: the steps whose `check` says why they are in it
    tests/run everything        the long form: before a capability is called finished
    tests/run mypy pytest       only these steps
    tests/run changed [COMMIT]  the tests which what has changed can reach, in a few minutes: changed.py says how

Short steps run beside the C tests, one after the other. Each step has a deadline; its log is tests/out/log/STEP, and
the end of a failed one's is shown. The last lines are a table: step, how it ended, seconds, what it said last. Python
tests that fail, of up to three files, are run once more with nothing beside them; those that pass then are named as not
steady, since they depend on the machine's load.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import changed
import durations
import long

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "out" / "log"
JOBS = len(os.sched_getaffinity(0))
SKIPPED = 77
AGAIN_MAX = 3  # files with failed tests, which are run once more, alone: more are no accident
ALONE_S = 900.0  # for those
SHOWN = 60  # lines of a failed step's log
FAULTS = re.compile(r"FAILED|^ERROR |Sanitizer|runtime error|^E  |^Failed: |^rank \d+ of |^[\w.]*(Error|Interrupt)\b")
# Addresses must not be random for the thread sanitizer of older compilers.
C_TESTS = f"setarch {os.uname().machine} -R make -s --no-print-directory -C tests -j {JOBS} check AT_ONCE={JOBS + 1} "
PYTEST = f"{sys.executable} -m pytest "
PREPARED = f"{PYTEST} --collect-only -qq tests; {sys.executable} -c 'import tensorflow, tf_keras'; "
PREPARED += f"{sys.executable} tests/support/overlays.py"
CHAOS = f"{sys.executable} tests/tools/chaos.py --trials 500 --seed 1"
BITS = C_TESTS + "ONLY='adasum algo kernel kinds learned negotiation_sim plane_bits'"
COUNTS = f"make -s --no-print-directory -C tests -j {JOBS} counted && {sys.executable} tests/tools/counts.py"
VIRTUAL = f"make -s --no-print-directory -C tests -j {JOBS} virtual "
FORMATTED = "find csrc tests examples -name '*.[ch]' -not -path 'tests/out/*' | xargs clang-format --dry-run -Werror"


HOUSE = " ".join(f"tests/project/test_{name}.py" for name in ("house", "floors", "circles"))

# What `changed` gives to tests where such a file has changed, in seconds of two idle cores. With the rest it comes to 1
# minute, 2 and 3: who waits longer looks at something else. The first that fits.
SECONDS = (("hvdlite/", 130.0), ("csrc/", 60.0), ("", 35.0))


class Step(NamedTuple):
    """check: why it is in the check of a commit, or nothing: it is in `everything` only, for the reason in `long`.
    beside: it is short, and runs beside the C tests."""

    name: str
    seconds: int
    command: str
    check: str = ""
    long: str = ""
    beside: bool = False


STEPS = (
    Step("ruff", 120, "ruff check --output-format concise .", check="seconds", beside=True),
    Step("format", 120, "ruff format --check .", check="seconds", beside=True),
    Step("clang-format", 120, FORMATTED, check="seconds", beside=True),
    Step("mypy", 600, "mypy", check="seconds; what users see is typed", beside=True),
    Step("address,undefined", 1800, C_TESTS + "SAN=address,undefined", check="all C tests, in the form that sees most"),
    Step("bits", 600, BITS, check="as it is shipped: what a sanitizer's build adds otherwise", beside=True),
    Step("virtual", 600, VIRTUAL + "SEEDS=60", check="20 s: engines in virtual time, lost wake-ups", beside=True),
    Step("counts", 900, COUNTS, check="instructions of the hot paths: a slower one is seen at once", beside=True),
    Step(
        "pytest",
        3600,
        PYTEST + f"-n {2 * JOBS} --no-loadscope-reorder -m 'not long' --durations=40 tests",
        check="all Python tests but those of long.py",
    ),
    Step("plain", 1800, C_TESTS, long="the same C tests as under the sanitizers, as they are shipped"),
    Step("thread", 2400, C_TESTS + "SAN=thread", long="7 minutes; who changes C runs it for what has changed"),
    Step("long", 5400, PYTEST + "-m long --durations=0 tests", long="slow by nature; long.py has the reasons"),
    Step("schedules", 5400, VIRTUAL + "SEEDS=6500", long="20 minutes; the check has a few hundred schedules"),
    Step(
        "planted", 3600, "make -s -C tests planted", long="a build of its own, and whether those schedules find faults"
    ),
    Step("interrupted", 1800, "make -s --no-print-directory -C tests interrupted", long="a build of its own"),
    Step("chaos", 5400, CHAOS, long="20 minutes; the check has a few trials"),
    Step("soak", 3600, f"{sys.executable} tests/tools/soak.py --minutes 30", long="the check has half a minute"),
    Step("fuzz", 3600, "make -s --no-print-directory -C tests fuzz", long="needs clang; what it found the check plays"),
    Step("oldest-tensorflow", 3600, "make -C tests oldest-tensorflow", long="an environment of its own"),
)


def known(words: list[str]) -> None:
    """ValueError: there is no step of that name."""
    steps = [step.name for step in STEPS]
    for word in words if words != ["everything"] and words[:1] != ["changed"] else []:
        if word in ("everything", "changed"):
            raise ValueError(f"{word} stands by itself")
        if word not in steps:
            raise ValueError(f"no step is called {word}; there are everything, changed, {', '.join(steps)}")


def chosen(words: list[str]) -> list[Step]:
    """The steps that are asked for. ValueError: there is none of that name."""
    if not words:
        return [step for step in STEPS if step.check]
    if words[0] == "changed" and len(words) <= 2:
        return of_change(*words[1:])
    if words == ["everything"]:
        return list(STEPS)
    known(words)
    steps = {step.name: step for step in STEPS}
    return [steps[word] for word in words]


def of_change(commit: str = "") -> list[Step]:
    """The steps for what has changed since a commit. Says which tests they run and what is left out."""
    base, paths = changed.since(ROOT, commit)
    tree = changed.texts(ROOT, paths)
    tests = {test for test in tree if changed.TEST.fullmatch(test) and tree[test] and not long.why(Path(test).stem, "")}
    takes = {test: durations.known(test) / JOBS for test in tests}
    most = next(most for folder, most in SECONDS if any(path.startswith(folder) for path in paths) or not folder)
    choice = changed.choose(paths, changed.graph(tree), takes, most)
    print(changed.says(base, paths, choice))

    def of(name: str, *words: str) -> Step:
        step = next(step for step in STEPS if step.name == name)
        return step._replace(command=" ".join([step.command.removesuffix(" tests") if words else step.command, *words]))

    def any_is(kinds: tuple[str, ...], folders: tuple[str, ...] = ("",)) -> bool:
        return any(path.endswith(kinds) and path.startswith(folders) for path in paths)

    in_c = [Path(test).stem[5:] for test in choice.run if test.endswith(".c")]
    in_python = [test for test in choice.run if test.endswith(".py")]
    steps = [of("ruff"), of("format")] if any_is((".py",)) else []
    steps += [of("clang-format")] if any_is((".c", ".h")) else []
    steps += [of("mypy")] if any_is((".py",), ("hvdlite/", "launcher/")) else []
    steps += [Step("house", 600, PYTEST + HOUSE)]
    steps += [of("address,undefined", f"ONLY='{' '.join(in_c)}'")] if in_c else []
    return steps + ([of("pytest", *in_python)] if in_python else [])


def run(step: Step) -> tuple[str, float, str]:
    """How it ended, after how many seconds, and the last line of its log."""
    began, log = time.monotonic(), LOGS / step.name
    needed = shlex.split(step.command)[0]
    if step.name == "mypy" and sys.version_info < (3, 10) and not shutil.which(needed):
        return "skipped", 0.0, "mypy needs Python 3.10"
    with log.open("w") as file:
        process = _begun(["bash", "-c", step.command], file, {"TESTS_EVERYTHING": "1"} if step.long else {})
        try:
            code = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            code = 124
            file.write(f"FAILED: no end within {step.seconds} s\n")
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith("WARNING")), "")
    alone = unsteady(step, "\n".join(lines)) if code == 1 and step.name == "pytest" else []
    if alone:
        code, last = 0, f"not steady (failed beside others, passed alone): {' '.join(alone)}"
    elif code and code != SKIPPED:
        print(f"\n{step.name} failed with {code}; the end of its log, {log.relative_to(ROOT)}:")
        print("\n".join(lines[-SHOWN:]))
        print("\n".join([line[:200] for line in lines[:-SHOWN] if FAULTS.search(line)][-SHOWN:]))
    how = "ok" if code == 0 else "skipped" if code == SKIPPED else "FAILED"
    return how, time.monotonic() - began, last.strip("= \r")[: 300 if alone else 100]


def unsteady(step: Step, text: str) -> list[str]:
    """The tests of this log that have failed, if they are few and all pass alone; else none. A file that cannot be
    imported has no tests."""
    names = re.findall(r"^(?:FAILED|ERROR) +(.+?)(?: - .*)?$", text.rpartition(" short test summary ")[2], re.MULTILINE)
    if not 0 < len({name.partition("::")[0] for name in names}) <= AGAIN_MAX or not all("::" in name for name in names):
        return []
    with (LOGS / f"{step.name}-alone").open("w") as file:
        process = _begun([*shlex.split(PYTEST), "-n", "0", *names], file, {})
        try:
            return names if process.wait(ALONE_S) == 0 else []
        except subprocess.TimeoutExpired:
            return []
        finally:
            _end(process)


def found(step: str, text: str) -> list[str]:
    """Of the log of a failed step: each test that has failed, why, and the command that runs it alone."""
    rows = []
    for kind, name, why in re.findall(r"^(FAILED|ERROR) +(.+?)( - .*| \(\d+\))?$", text, re.MULTILINE):
        sanitizer = f" SAN={step}" if step in ("address,undefined", "thread") else ""
        again = f"make -C tests check{sanitizer} ONLY={name[5:]}" if name.startswith("test_") else f"pytest '{name}'"
        rows.append(f"{kind} {name}{why[:200]}\n    {again}")
    return list(dict.fromkeys(rows))[:SHOWN]


def _prepare() -> None:
    """While the C tests run: the byte code of what Python tests import is written, and what they need beside the
    environment is installed. A test that comes first waits, or compiles it by itself."""
    with (LOGS / "prepared").open("w") as log:
        _begun(["nice", "bash", "-c", PREPARED], log, {})


_running: list[subprocess.Popen[bytes]] = []  # what an interrupt has to end


def _begun(words: list[str], log: IO[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a group of its own. more: variables."""
    env = {**os.environ, **more}
    process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=env)
    _running.append(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """What a step has started ends with it: first with the stacks of the tests that hang."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ValueError):  # two threads may end it
        _running.remove(process)


def main(words: list[str]) -> int:
    try:
        if words[:1] == ["--known"]:  # tests/run asks before it installs
            known(words[1:])
            return 0
        steps = chosen(words)
    except ValueError as error:
        print(error)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    began, rows, over = time.monotonic(), [], threading.Event()
    if any(step.name == "pytest" for step in steps) and words[:1] != ["changed"]:
        _prepare()

    def take(beside: bool) -> None:
        for step in steps:
            if step.beside == beside and not over.is_set():
                if step.name == "pytest":
                    other.result()  # some of its tests build what bits and counts do
                how, seconds, last = run(step)
                rows.append((step.name, how, seconds, last))
                print(f"{step.name:18}{how:8}{seconds:6.0f} s  {last}", flush=True)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(take, True)
        try:
            take(False)
            other.result()
        finally:  # also where this process is interrupted
            over.set()
            for process in list(_running):
                _end(process)
    failed = [name for name, how, _, _ in rows if how == "FAILED"]
    print()
    for name, how, seconds, last in rows:
        print(f"{how:8} {name:18}{seconds:6.0f} s  {last}")
    for name in failed:
        print("\n".join(found(name, (LOGS / name).read_text(errors="replace"))))
    spent = f"{time.monotonic() - began:.0f} s"
    print(f"failed: {' '.join(failed)} (after {spent})" if failed else f"all passed in {spent}")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
