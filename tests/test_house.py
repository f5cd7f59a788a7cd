"""The rules of the house, checked: floors, purity, limits, names, essays, one symbol per plug-in, no machine's paths.

Only the standard library and pytest; the C compiler is asked about symbols, and tests that need it skip without one.
`python tests/test_house.py` prints the sizes alone, so that growth is seen.
"""

import ast
import functools
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import durations

import csource

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

C_LINES, PYTHON_LINES, FUNCTION_LINES, ESSAY_LINES = 400, 350, 66, 5  # "about 60" with a tenth of patience
TOUR_LINES = 200  # of csrc/README.md: what belongs to one file stands in that file

# An include or import only points down: to a smaller number, or stays in its folder (C) or at a listed neighbour.
C_FLOOR = {"ground": 0, "kernel": 1, "algo": 1, "link": 1, "coord": 2, "plane": 2, "codec": 2, "trace": 2}
C_FLOOR.update({"engine": 3, "": 4, "mpi": 0.5, "cuda": 1, "nccl": 1, "tensorflow": 5})
PYTHON_FLOOR = {"errors": 0, "_wire": 0, "_cffi": 0, "_build": 0, "config": 1, "_store": 2, "discovery": 2, "_core": 2}
PYTHON_FLOOR.update(
    {"launcher": 3, "_bytes": 3, "_meeting": 4, "process_set": 4, "_opening": 3.5, "_life": 5, "adapter": 4, "mpi": 3}
)
PYTHON_FLOOR.update(
    {"memory": 3, "links": 3, "gpu": 3, "_given": 4, "counted": 3, "_failing": 4, "_digests": 1, "_same_data": 2}
)
PYTHON_FLOOR.update({"ops": 5, "objects": 5, "mesh": 5, "optimizer": 6, "_public": 7, "numpy": 8, "torch": 8})
PYTHON_FLOOR.update({"keras": 9, "__init__": 9, "tensorflow": 10, "superseded": 0, "_option": -1, "_coded": -2})
PYTHON_FLOOR.update(
    {"_strangers": 0, "_gate": 0.5, "_http": 0.5, "_handshake": 1, "_secret": 1, "_sealed": 1, "_python": 0}
)
PYTHON_FLOOR.update({"_machine": 0, "_numbers": 0, "_slurm": 1, "_files": 1, "running": 5, "_called": 5, "traffic": 5})
PYTHON_FLOOR.update({"options": 0, "elastic": 6, "built": 5, "data": 6, "as_horovod": 11, "autotune": 4, "guard": 3})
PYTHON_FLOOR.update({"consistency": 6, "_records": 1, "trace": 3, "measured": 4, "stepping": 0, "catalogue": -2})
PYTHON_FLOOR.update({"_messages": -3, "_warned": -3, "_interrupts": 0})
PYTHON_FLOOR.update({"_torch_backend": 1, "_member": 4, "_static_sets": 4.5, "_state_file": 1, "_state_form": 1})
PYTHON_FLOOR.update({"driven": 6, "hello": 9.5, "ray": 9, "spark": 10.5, "dask": 9})
PYTHON_FLOOR.update({"parallel": 9, "_curve": 1, "ps": 7.5, "rpc": 7.5, "plan": 9.5, "predict": 9.6, "trainers": 9})
# The launcher imports no NumPy.
LAUNCHER_MAY_IMPORT = {"config", "options", "errors", "_numbers", "_wire", "_slurm", "_files", "_machine", "launcher"}
LAUNCHER_MAY_IMPORT |= {"_coded", "_handshake", "_python", "_secret", "_strangers", "discovery", "catalogue"}

PURE = ("coord", "algo")
PURE_HEADERS = {"assert", "inttypes", "limits", "stdarg", "stdbool", "stddef", "stdint", "stdio", "string"}
PURE_FORBIDDEN = re.compile(
    r"(pthread_\w+|clock\w*|time|gettimeofday|\w*sleep|sched_\w+|malloc|calloc|realloc|free|mmap|munmap|alloca|f?printf|fopen|"
    r"f?puts|putchar|fflush|std(in|out|err)|socket|send(to|m?msg)|recv(from|m?msg)?|poll|epoll\w*|syscall|getenv|rand\w*|hvd_now_ns|atomic_\w+)"
)
PLUG_INS = ("plane", "algo", "link", "codec")  # csrc/plane/x.c exports hvd_plane_x and nothing else
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


def test_functions_stay_within_their_limit():
    found = [(path, csource.functions(read(path))) for path in C_FILES + C_TESTS]
    found += [(path, python_functions(path)) for path in ALL_PYTHON]
    complain(
        [f"{name(p)}:{f.line}: {f.name} has {f.lines} lines" for p, fs in found for f in fs if f.lines > FUNCTION_LINES]
    )


def test_c_includes_point_down():
    wrong = []
    for path in C_FILES:
        for include in csource.includes(read(path)):
            if not include.startswith('"'):
                continue
            target = next(
                (base / include.strip('"') for base in (path.parent, CSRC) if (base / include.strip('"')).exists()),
                None,
            )
            if target is None:
                wrong.append(f"{name(path)}: {include} does not exist")
                continue
            here, there = folder(path), folder(target.resolve())
            if here == there or target.name == "hvdlite.h":
                continue
            if here not in C_FLOOR or there not in C_FLOOR:
                wrong.append(f"{name(path)}: give {here} and {there} a floor")
            elif C_FLOOR[there] >= C_FLOOR[here]:
                wrong.append(f"{name(path)} (floor {C_FLOOR[here]}) includes {include} (floor {C_FLOOR[there]})")
    complain(wrong)


def test_platform_conditions_stay_in_ground():
    platform = re.compile(
        r"^[ \t]*#[ \t]*(?:el)?if.*(?:__linux__|__APPLE__|_WIN32|__FreeBSD__|__GLIBC__)", re.MULTILINE
    )
    complain([name(path) for path in C_FILES if folder(path) != "ground" and platform.search(read(path))])


def imported(path):
    """Dotted names that a module imports anywhere in its text, relative ones resolved."""
    package = ["hvdlite", *path.relative_to(ROOT).parts[:-1]]
    package = package[1:] if path.is_relative_to(ROOT / "hvdlite") else package
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def module_floor(dotted):
    """The key in PYTHON_FLOOR of hvdlite.x.y."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PYTHON_FLOOR else "__init__"


def test_python_imports_point_down():
    wrong = []
    for path in PYTHON_FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        here = "launcher" if parts[0] == "launcher" else parts[1]
        if here not in PYTHON_FLOOR:
            wrong.append(f"{name(path)}: give it a floor in tests/test_house.py")
            continue
        if here == "__init__":
            continue  # it hands out names lazily; that it loads nothing is tested where it is imported
        for dotted in imported(path):
            if not dotted.startswith("hvdlite"):
                continue
            there = module_floor(dotted)
            if there == here or dotted == "hvdlite.__version__":
                continue
            too_much = here == "launcher" and there not in LAUNCHER_MAY_IMPORT | {"_records"}
            if PYTHON_FLOOR[there] >= PYTHON_FLOOR[here] or too_much:
                wrong.append(
                    f"{name(path)} (floor {PYTHON_FLOOR[here]}) imports {dotted} (floor {PYTHON_FLOOR[there]})"
                )
    complain(wrong)


def test_only_core_imports_the_extension():
    loaders = {name(path) for path in PYTHON_FILES if any("_cffi" in dotted for dotted in imported(path))}
    complain(sorted(loaders - {"hvdlite/_core/library.py"}))


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
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    wrong = [f"{name(p)}: getenv" for p in C_FILES if csource.identifiers(read(p)) & (forbidden | {"secure_getenv"})]
    for path in PYTHON_FILES:
        if name(path) == "hvdlite/config.py":
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
            and path.stem != "table"
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
    assert not unknown, f"python tests/durations.py: {sorted(unknown)}"
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
