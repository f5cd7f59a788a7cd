"""Which tests can a change reach, and which of them are the nearest? For the step `changed` of tests/run.

A file reads another one where it includes or imports it, or names it in a string: programs of tests stand in strings.
A header reads the C files beside and below it that include it, because what it declares is defined there. A test is
reached from a changed file over any number of such steps. Nearest are those with the fewest steps; each word that the
test's name shares with the changed file's folder counts as one step less, and one of its own name as two: thirty tests
run the launcher, but test_launcher_slurm.py asks about slurm. At one distance the short ones come first, until the
seconds are used up.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import csource

READ = {".py", ".c", ".h"}
PROGRAM = re.compile(
    r"tests/(?!c/)\w+/test_\w+\.py|tests/c/(test|bench|count)_\w+\.c"
)  # nothing reads one by its header
TEST = re.compile(r"tests/(?!c/)\w+/test_(?!house)\w+\.py|tests/c/test_\w+\.c")  # the rules of the house are always run
# The folder of a module, and what stands before its name when it is imported. The first that fits.
PACKAGES = ((r"launcher/", "hvdlite.launcher."), (r"hvdlite/", "hvdlite."), (r"tests/(?:\w+/)?", ""))
PACKAGES += ((r"examples/benchmarks/", ""), (r"examples/", ""))
# What a file has built or loads, which its text does not name: their paths.
LOADS = {
    "hvdlite/_core/library.py": r"csrc/api\w*\.c",
    "hvdlite/jax/native.py": r"csrc/jax/.*",
    "hvdlite/tensorflow/ops/kernels.py": r"csrc/tensorflow/.*",
    "tests/c/gpus.c": r"tests/stub/\w+\.[ch]",
    "tests/c/mpis.c": r"tests/stub/mpi/.*",
    "tests/c/test_fuzz.c": r"tests/fuzz/\w+\.txt",
    "tests/support/gpus.py": r"tests/stub/\w+\.[ch]",
    "tests/support/mpis.py": r"tests/stub/mpi/.*",
}
IN_TEXT = re.compile(
    r"\bfrom +([\w.]+) +import +([\w, ]+)|\bimport +([\w.]+)|\b(hvdlite(?:\.\w+)+)|(?<![\w.])(\.\w[\w.]*)$"
)
FILE_NAME = re.compile(r"\b[\w-]+\.[a-z]+\b")
PLACES = {
    "py",
    "c",
    "h",
    "test",
    "tests",
    "support",
    "csrc",
    "hvdlite",
    "init",
    "of",
    "and",
    "on",
}  # words that say nothing


class Choice(NamedTuple):
    """The tests that are run, nearest first, and those that are reached too."""

    run: list[str]
    left: list[str]


def since(root: Path, commit: str = "") -> tuple[str, list[str]]:
    """The commit that the working tree is compared with, and the files that differ, those that git does not know yet
    among them. Without a name it is HEAD, or the commit before it where nothing is uncommitted; another branch's commit
    is the one that both have come from. ValueError: there is no such commit."""

    def differ(base: str) -> list[str]:
        tracked = _git(root, "diff", "--name-only", "--no-renames", base)
        return sorted({*tracked, *_git(root, "ls-files", "--others", "--exclude-standard")})

    paths = differ("HEAD") if not commit else []
    if paths:
        return "HEAD", paths
    (base,) = _git(root, "merge-base", "HEAD", commit or "HEAD~1")
    return commit or "HEAD~1", differ(base)


def texts(root: Path, changed: list[str]) -> dict[str, str]:
    """The files of the working tree by path, with the text of those that may name others. One that is deleted is there
    as well, empty, so that who still names it is reached."""
    paths = _git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    read = {path for path in paths if Path(path).suffix in READ and (root / path).is_file()}
    return {path: (root / path).read_text(errors="replace") if path in read else "" for path in {*paths, *changed}}


def graph(tree: dict[str, str]) -> dict[str, set[str]]:
    """Who reads a file, by the file."""
    modules = {module: path for path in tree if (module := _module(path))}
    named = defaultdict(set)
    for path in tree:
        named[path.rpartition("/")[2]].add(path)
    readers = defaultdict(set)
    for path, text in tree.items():
        reads = _included(path, text, tree) if path.endswith((".c", ".h")) else _imported(path, text, modules, named)
        reads |= {other for other in tree if path in LOADS and re.fullmatch(LOADS[path], other)}
        for other in reads - {path}:
            readers[other].add(path)
    for header, source in [pair for path in tree if path.endswith(".h") for pair in _defined(path, readers)]:
        readers[source].add(header)
    readers["tests/conftest.py"] |= {test for test in filter(TEST.fullmatch, tree) if test.endswith(".py")}
    return readers


def nearness(changed: str, readers: dict[str, set[str]]) -> dict[str, int]:
    """The tests that this file reaches: steps, less the words that both names have."""
    steps = _spread(changed, readers, lambda _: True)
    folder, _, name = changed.rpartition("/")
    return {
        test: far - len(_words(folder) & _words(test)) - 2 * len(_words(name) & _words(test))
        for test, far in steps.items()
        if TEST.fullmatch(test)
    }


def choose(changed: list[str], readers: dict[str, set[str]], seconds: dict[str, float], most: float) -> Choice:
    """Of the tests whose seconds are given, the nearest that fit in `most`. One that has changed is run in any case."""
    near: dict[str, int] = {}
    for path in changed:
        for test, far in nearness(path, readers).items():
            if test in seconds:
                near[test] = min(far, near.get(test, far))
    ranked = sorted(near, key=lambda test: (test not in changed, near[test], seconds[test], test))
    run, left, spent = [], [], 0.0
    for test in ranked:
        if test in changed or spent + seconds[test] <= most:
            run.append(test)
            spent += seconds[test]
        else:
            left.append(test)
    return Choice(run, left)


def says(base: str, changed: list[str], choice: Choice) -> str:
    """What is run, and what is left out: nothing is so in silence."""
    lines = [f"changed since {base}: {' '.join(changed) or 'nothing'}"]
    for what, end in (("C", ".c"), ("Python", ".py")):
        names = [Path(test).stem for test in choice.run if test.endswith(end)]
        lines.append(f"{len(names)} files of {what} tests: {' '.join(names)}" if names else f"no {what} tests")
    if choice.left:
        nearest = " ".join(Path(test).name for test in choice.left[:4])
        lines.append(
            f"{len(choice.left)} further test files can be reached (nearest: {nearest}): "
            "tests/run address,undefined pytest"
        )
    return "\n".join(lines) + "\n"


def _git(root: Path, *words: str) -> list[str]:
    made = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=root, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"git {' '.join(words)}: {made.stderr.strip()}")
    return made.stdout.split("\n")[:-1]


def _spread(start: str, readers: dict[str, set[str]], may: Callable[[str], bool]) -> dict[str, int]:
    """The least number of steps to each file that reads this one, directly or not, over files that `may` be passed."""
    steps, edge = {start: 0}, [start]
    while edge:
        found = {reader for path in edge for reader in readers.get(path, ()) if reader not in steps and may(reader)}
        steps.update(dict.fromkeys(found, steps[edge[0]] + 1))
        edge = sorted(found)
    return steps


def _defined(header: str, readers: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The header with each C file that includes it, beside it and below; below hvdlite.h is all of the core."""
    folder = header.rpartition("/")[0] + "/"
    inside = re.compile(folder + ("[^/]+" if folder == "csrc/" else ".+"))
    for source in _spread(header, readers, lambda path: bool(inside.fullmatch(path))):
        if source.endswith(".c") and not PROGRAM.fullmatch(source):
            yield header, source


def _words(path: str) -> set[str]:
    return set(re.split(r"[/_.]+", path)) - PLACES - {""}


def _module(path: str) -> str:
    """The name that a Python file is imported by."""
    if not path.endswith(".py"):
        return ""
    for folder, prefix in PACKAGES:
        if found := re.match(folder, path):
            dotted = prefix + path[found.end() : -3].replace("/", ".")
            return re.sub(r"\.?__init__$", "", dotted).rstrip(".")
    return ""


def _included(path: str, text: str, tree: dict[str, str]) -> set[str]:
    here = path.rpartition("/")[0]
    found = set()
    for include in csource.includes(text):
        for folder in (here, "csrc", "tests/c"):
            parts: list[str] = []
            for part in f"{folder}/{include.strip(chr(34))}".split("/"):
                parts = parts[:-1] if part == ".." else [*parts, part]
            if "/".join(parts) in tree:
                found.add("/".join(parts))
                break
    return found


def _imported(path: str, text: str, modules: dict[str, str], named: dict[str, set[str]]) -> set[str]:
    """What it imports, anywhere in its text, and the modules and files that its strings name. That a package is
    imported with a module in it does not count: hvdlite itself would be read by all."""
    try:
        tree = ast.parse(text if path.endswith(".py") else "")
    except SyntaxError:  # ruff says so
        return set()
    package = _module(path) if path.endswith("__init__.py") else _module(path).rpartition(".")[0]
    dotted, files = set(), set()

    def base(level: int) -> str:
        return ".".join(package.split(".")[: len(package.split(".")) - level + 1])

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(filter(None, [base(node.level) if node.level else "", node.module]))
            dotted |= {f"{start}.{alias.name}" for alias in node.names}
    for string in _strings(tree):
        for start, names, whole, inside, relative in IN_TEXT.findall(string):
            dotted |= {f"{start}.{name.split()[0]}" for name in names.split(",") if name.strip()}
            dotted |= {whole, inside, f"{package}{relative}" if relative and package else ""}
        files |= {file for word in FILE_NAME.findall(string) for file in named.get(word, ())}
    for name in filter(None, dotted):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            files.add(modules[name])
            files |= {main for main in [modules.get(f"{name}.__main__")] if main}
    return files


def _strings(tree: ast.Module) -> Iterator[str]:
    """Those that a program uses: what stands alone, as a docstring does, is for readers."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value
