"""The rules of the house, checked: floors, purity, limits, names, essays, one symbol per plug-in, no machine's paths.

Only the standard library and pytest; the C compiler is asked about symbols, and tests that need it skip without one.
`python tests/project/test_house.py` prints the sizes alone, so that growth is seen.
"""

import ast
import collections
import functools
import os
import re
from pathlib import Path

import durations

import csource

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

C_LINES, PYTHON_LINES, FUNCTION_LINES, ESSAY_LINES = 400, 350, 66, 5  # "about 60" with a tenth of patience
TOUR_LINES = 200  # of csrc/README.md: what belongs to one file stands in that file

PURE = ("negotiation", "algo")
PURE_HEADERS = {"assert", "inttypes", "limits", "stdarg", "stdbool", "stddef", "stdint", "stdio", "string"}
PURE_FORBIDDEN = re.compile(
    r"(pthread_\w+|clock\w*|time|gettimeofday|\w*sleep|sched_\w+|malloc|calloc|realloc|free|mmap|munmap|alloca|f?printf|fopen|"
    r"f?puts|putchar|fflush|std(in|out|err)|socket|send(to|m?msg)|recv(from|m?msg)?|poll|epoll\w*|syscall|getenv|rand\w*|hvd_now_ns|atomic_\w+)"
)
PLUG_INS = ("plane", "algo", "link", "codec")  # csrc/plane/x.c exports hvd_plane_x and nothing else
# Words of our own making that the terms of the field have replaced, in identifiers and first lines of the sources.
RETIRED = re.compile(
    r"(?<![a-z])(book|branches|desk|flying|heard|land(ed|ing|s|)|lent|muster|pulse|rider|said|sayings?|seats?|sheet|shelf|"
    r"told|under_way|whoever)(?![a-z])"
)
RETIRED_FILES = re.compile(
    r"_?(allocated|asked|built|called|carried|checked|counted|failing|given|kept|late|launched|leashed|logged|measured|"
    r"owned|running|serving|soon|starting|together|twice|untaken|unmet)"
)
RETIRED_C = re.compile(r"\bhvd_(soon|ride|riders|near|guess|learn|desk|wire|wires|agree|keep|meet)(_|\b)")
FORBIDDEN_WORDS = {"manager", "helper", "helpers", "util", "utils", "common", "context", "info"}
TEXT = {".c", ".h", ".py", ".md", ".toml", ".cfg", ".in", ".txt", ".svg", ".yml", ".yaml", ""}


def files(*patterns):
    """Files of the tree that a patterns names, without what is built."""
    built = re.compile(r"(^|/)(build|dist|out|__pycache__|\.venv[^/]*|\.git|[^/]*\.egg-info|\.[a-z]+_cache)(/|$)")
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not built.search(path.relative_to(ROOT).as_posix()))


C_FILES = files("csrc/**/*.[ch]")
C_TESTS = files("tests/**/*.[ch]")
PYTHON_FILES = files("hvdlite/**/*.py", "launcher/**/*.py")
ALL_PYTHON = PYTHON_FILES + files("*.py", ".ci/*.py", "tests/**/*.py", "examples/**/*.py")


def name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def read(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path):
    return ast.parse(read(path))


@functools.cache
def lines(path):
    """Of a file. Docstrings of functions and classes do not count: they are what a user reads."""
    return read(path).count("\n") - (sum(map(doc_lines, ast.walk(tree(path)))) if path.suffix == ".py" else 0)


def doc_lines(node):
    inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    if not inside or ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def python_functions(path):
    """(name, line, lines) of each function; a docstring does not count, it is what we want more of."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            long = node.end_lineno - node.lineno + 1 - doc_lines(node)
            yield csource.Piece(node.name, node.lineno, long)


def folder(path):
    """The folder of csrc/ that a C file belongs to; '' for api.c and hvdlite.h themselves."""
    inside = path.relative_to(CSRC).parts
    return inside[0] if len(inside) > 1 else ""


def complain(wrong):
    assert not wrong, "\n" + "\n".join(wrong)


def test_files_stay_within_their_limit():
    limits = [(path, C_LINES) for path in C_FILES + C_TESTS] + [(path, PYTHON_LINES) for path in ALL_PYTHON]
    complain([f"{name(path)}: {lines(path)} lines, {limit} allowed" for path, limit in limits if lines(path) > limit])


def test_folders_stay_small():
    """A folder of the sources holds at most 25 files, and the top of a package few of them."""
    count = collections.Counter(path.parent.relative_to(ROOT).as_posix() for path in PYTHON_FILES + C_FILES)
    most = {"hvdlite": 8, "launcher": 10}
    complain([f"{where}: {n} files" for where, n in count.items() if n > most.get(where, 25)])


def test_functions_stay_within_their_limit():
    found = [(path, csource.functions(read(path))) for path in C_FILES + C_TESTS]
    found += [(path, python_functions(path)) for path in ALL_PYTHON]
    complain(
        [f"{name(p)}:{f.line}: {f.name} has {f.lines} lines" for p, fs in found for f in fs if f.lines > FUNCTION_LINES]
    )


def test_platform_conditions_stay_in_ground():
    platform = re.compile(
        r"^[ \t]*#[ \t]*(?:el)?if.*(?:__linux__|__APPLE__|_WIN32|__FreeBSD__|__GLIBC__)", re.MULTILINE
    )
    complain([name(path) for path in C_FILES if folder(path) != "base" and platform.search(read(path))])


def test_pure_floors_include_and_call_nothing_impure():
    wrong = []
    for path in C_FILES:
        if folder(path) not in PURE:
            continue
        text = read(path)
        system = [i.strip("<>").removesuffix(".h") for i in csource.includes(text) if i.startswith("<")]
        wrong += [f"{name(path)}: <{header}.h>" for header in system if header not in PURE_HEADERS]
        wrong += [f"{name(path)}: {word}" for word in csource.identifiers(text) if PURE_FORBIDDEN.fullmatch(word)]
    complain(wrong)


def test_environment_is_read_in_config_only():
    """Elsewhere not even the name os.environ may stand; a whole environment to hand to children is config.environ()."""
    exempt = ("hvdlite/config/__init__.py", "launcher/agent/fork_server.py")  # the latter imports nothing of hvdlite
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    wrong = [f"{name(p)}: getenv" for p in C_FILES if csource.identifiers(read(p)) & (forbidden | {"secure_getenv"})]
    for path in PYTHON_FILES:
        if name(path) in exempt:
            continue
        for node in ast.walk(tree(path)):
            of_os = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
            imported_name = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and forbidden & {a.name for a in node.names}
            )
            if (of_os and node.attr in forbidden) or imported_name:
                wrong.append(f"{name(path)}:{node.lineno}: reads the environment; config does that")
    complain(wrong)


def test_external_symbols_are_ours(symbols):
    complain(
        [f"{name(p)}: {s}" for p, (defined, _) in symbols.items() for s in sorted(defined) if not s.startswith("hvd_")]
    )


def test_a_plug_in_exports_one_symbol(symbols):
    wrong = []
    for path, (defined, _) in symbols.items():
        inside = path.relative_to(CSRC).parts
        if (
            len(inside) == 2
            and inside[0] in PLUG_INS
            and path.stem != "registry"
            and set(defined) != {f"hvd_{inside[0]}_{path.stem}"}
        ):
            wrong.append(f"{name(path)} exports {sorted(defined)}, it should export hvd_{inside[0]}_{path.stem} alone")
    complain(wrong)


def test_pure_floors_link_to_nothing_impure(symbols):
    allowed = re.compile(
        r"hvd_(?!now_ns|futex|bells|cpus)\w+|_?_?(mem|str)\w+|_*v?snprintf(_chk)?|__stack_chk_fail|_GLOBAL_OFFSET_TABLE_"
    )
    pure = [(path, undefined) for path, (_, undefined) in symbols.items() if folder(path) in PURE]
    complain(
        [f"{name(path)} needs {s}" for path, undefined in pure for s in sorted(undefined) if not allowed.fullmatch(s)]
    )


def test_every_source_opens_with_an_essay():
    wrong = [f"{name(p)}" for p in C_FILES if csource.essay_lines(read(p)) < ESSAY_LINES]
    for path in PYTHON_FILES:
        doc = ast.get_docstring(tree(path)) or ""
        if doc.count("\n") + 1 < ESSAY_LINES and lines(path) > 20:
            wrong.append(name(path))
    complain(wrong)


def test_names_say_what_a_thing_is():
    def bad(identifier):
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", identifier).lower().split("_")
        return FORBIDDEN_WORDS & set(words)

    wrong = [name(path) for path in C_FILES + C_TESTS + ALL_PYTHON if bad(path.stem)]
    for path in C_FILES + C_TESTS:
        wrong += [f"{name(path)}: {f.name}" for f in csource.functions(read(path)) if bad(f.name)]
    for path in ALL_PYTHON:
        wrong += [f"{name(path)}: {f.name}" for f in python_functions(path) if bad(f.name)]
    complain([each for each in wrong if not each.endswith(": train_func_context")])  # Ray Train's name


def test_names_are_the_terms_of_the_field():
    wrong = [f"{name(path)}: {path.stem}" for path in PYTHON_FILES + C_FILES if RETIRED_FILES.fullmatch(path.stem)]
    for path in PYTHON_FILES:
        for node in ast.walk(tree(path)):
            found = next(
                (getattr(node, field) for field in ("id", "attr", "arg", "name") if hasattr(node, field)), None
            )
            if isinstance(found, str) and RETIRED.search(re.sub(r"([a-z])([A-Z])", r"\1_\2", found).lower()):
                wrong.append(f"{name(path)}: {found}")
        first = read(path).partition("\n")[0]
        if "?" in first or RETIRED.search(first.lower()):
            wrong.append(f"{name(path)}: the first line says what the file holds, in the terms of the field: {first}")
    wrong += [f"{name(path)}: {word.group()}" for path in C_FILES for word in RETIRED_C.finditer(read(path))]
    complain(wrong)


def test_the_tour_mentions_every_folder():
    folders = {folder(path) for path in C_FILES} - {""}
    text = read(CSRC / "README.md")
    complain([f"csrc/README.md does not mention {f}/" for f in sorted(folders) if f"{f}/" not in text])


def test_the_tour_stays_short():
    page = CSRC / "README.md"
    assert lines(page) <= TOUR_LINES, f"{name(page)}: {lines(page)} lines, {TOUR_LINES} allowed"


def test_links_of_the_pages_lead_somewhere():
    wrong = []
    for page in files("*.md", "csrc/**/*.md", "docs/**/*.md", "launcher/*.md", "tests/*.md", "examples/**/*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", read(page)):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{name(page)}: {target}")
    complain(wrong)


def test_no_path_of_a_machine_and_no_host_of_a_registry():
    wrong = []
    words = ["/wo" + "rk/", "/tmp/" + "hv", "/ro" + "ot/", "/opt/" + "pypi", "pypi" + ".org", "download." + "pytorch"]
    found = re.compile("|".join(map(re.escape, words)) + r"|/ho" + r"me/\w+/")
    folders = (f"{each}/**/*" for each in ("csrc", "docs", "examples", "hvdlite", "launcher", "tests"))
    for path in files("*", ".ci/*", *folders):
        if path.suffix in TEXT and not path.name.startswith(".venv"):
            for number, line in enumerate(read(path).split("\n"), 1):
                if found.search(line):
                    wrong.append(f"{name(path)}:{number}: {line.strip()[:100]}")
    complain(wrong)


def test_tests_stay_within_their_budget_of_seconds():
    budgets, seconds = durations.budgets(durations.BUDGET.read_text())
    unknown = set(seconds) ^ {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert not unknown, f"python tests/tools/durations.py: {sorted(unknown)}"
    assert sum(seconds.values()) <= budgets[-1][0], "make tests shorter, or add a budget that says why"
    assert all(b <= a or len(why.split()) > 3 for (a, _), (b, why) in zip(budgets, budgets[1:])), "why does it rise?"


def test_the_version_is_written_once():
    header = re.search(r'#define HVD_VERSION "(.+)"', read(CSRC / "hvdlite.h")).group(1)
    python = re.search(r'^__version__ = "(.+)"', read(ROOT / "hvdlite/__init__.py"), re.MULTILINE)
    assert python is not None and python.group(1) == header


def sizes():
    """A table: per folder files, lines and the longest file."""
    rows = {}
    for path in C_FILES + C_TESTS + ALL_PYTHON:
        rows.setdefault(os.path.dirname(name(path)) or ".", []).append((lines(path), path.name))
    text = [f"{'folder':32} {'files':>5} {'lines':>6}  longest"]
    for key, found in sorted(rows.items()):
        text.append(f"{key:32} {len(found):5} {sum(n for n, _ in found):6}  {max(found)[1]} ({max(found)[0]})")
    text.append(f"{'all':32} {sum(map(len, rows.values())):5} {sum(n for found in rows.values() for n, _ in found):6}")
    return "\n".join(text)


def test_sizes_are_seen(capsys):
    with capsys.disabled():
        print("\n" + sizes())


if __name__ == "__main__":
    print(sizes())
