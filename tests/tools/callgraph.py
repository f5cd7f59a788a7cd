"""Which file of csrc/ calls which, seen from the symbols of its object files; and what that graph must not have.

A file that needs a symbol calls the file that defines it. Calls through a table of function pointers are no calls of
the file that has the table: csrc/plane/registry.c and csrc/algo/registry.c name their plug-ins, which use functions of
these files, so data symbols would make a circle of every plug-in folder. There only functions count. In the engine,
which has no such table, data counts as well.
"""

import re
import subprocess
from pathlib import Path

FUNCTIONS = frozenset("TWi")  # what nm calls functions; everything else external is data
TABLE = re.compile(r"^### The folders of engine/\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)


def symbols(root: Path, sources: list) -> dict:
    """{source: ({defined external name: nm's letter}, undefined names)}; the Makefile of the C tests builds them."""
    objects = {path: root / "tests/out/plain" / path.relative_to(root).with_suffix(".o") for path in sources}
    made = subprocess.run(
        ["make", "-s", "-C", "tests", *map(str, objects.values())], cwd=root, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    result = {}
    for source, built in objects.items():
        listed = subprocess.run(["nm", "-g", str(built)], capture_output=True, text=True, check=True).stdout.split("\n")
        entries = [line.split() for line in listed if line]
        result[source] = ({e[-1]: e[-2] for e in entries if e[-2] != "U"}, {e[-1] for e in entries if e[-2] == "U"})
    return result


def calls(symbols: dict, data: bool = False) -> dict:
    """{file: other files that define what it needs}: functions, and data too if `data`."""
    owner = {s: file for file, (names, _) in symbols.items() for s, kind in names.items() if data or kind in FUNCTIONS}
    return {file: {owner[s] for s in needs if s in owner} - {file} for file, (_, needs) in symbols.items()}


def circles(graph: dict) -> set:
    """The strongly connected components of more than one file."""
    reached = {}
    for start in graph:
        seen, ahead = set(), [start]
        while ahead:
            fresh = graph.get(ahead.pop(), set()) - seen
            seen |= fresh
            ahead += fresh
        reached[start] = seen
    return {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}


def rooms(page: str) -> dict:
    """{folder of the engine: folders that it may call}, by the table of csrc/README.md; "engine" is engine/ itself."""
    result = {}
    for row in TABLE.search(page).group(1).split("\n"):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        name = re.match(r"`(\w+)/`", cells[0])
        if name and len(cells) == 3:
            named = set(re.findall(r"`(\w+)/?`", cells[2]))
            result[name.group(1)] = named | (set(result) if "all above" in cells[2] else set())
    return result


def room(file: str) -> str:
    """The folder of csrc/engine/ that a file belongs to; "" outside the engine."""
    parts = file.split("/")
    return "" if parts[0] != "engine" else parts[1] if len(parts) > 2 else "engine"


def trespasses(graph: dict, allowed: dict) -> list:
    """Calls in the engine into a folder that the caller's folder may not call. The floors below are open to all."""
    return [
        f"{file} calls {other}: {room(file)} may call {sorted(allowed.get(room(file), ()))}"
        for file in sorted(graph)
        for other in sorted(graph[file])
        if room(file) and room(other) not in {"", room(file)} | allowed.get(room(file), set())
    ]
