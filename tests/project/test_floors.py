"""The floors of the house: which folder may include or import which. `test_house.py` has the other rules.

A floor is a line of PYTHON_FLOORS or LAUNCHER_FLOORS, or a number of C_FLOOR. An include or import points to a smaller
floor, or stays in its folder. The environment, the C compiler and the network are not needed.
A new package gets a line, or a place in one; nothing else is registered.
"""

import ast

from test_house import C_FILES, CSRC, PYTHON_FILES, ROOT, complain, files, folder, name, read, tree

import csource

# An include or import only points down: to a smaller number, or stays in its folder (C) or at a listed neighbour.
C_FLOOR = {"base": 0, "kernel": 1, "algo": 1, "link": 1, "negotiation": 2, "plane": 2, "codec": 2, "trace": 2}
C_FLOOR.update({"engine": 3, "": 4, "mpi": 0.5, "cuda": 1, "nccl": 1, "jax": 5, "tensorflow": 5, "torch": 5})
PYTHON_FLOORS = """errors _cffi
config security system _torch_backend
_core
transport
rendezvous trace
launcher mpi
process_sets
ops
training
autotune metrics
lifecycle trainers
data elastic executors rpc
_api dask ray
numpy ps
__init__ torch
aggregation hello keras parallel
jax plan spark tensorflow
as_horovod elastic_pipeline predict"""  # a line for each floor, from the bottom
PYTHON_FLOOR = {package: floor for floor, line in enumerate(PYTHON_FLOORS.split("\n")) for package in line.split()}
LAUNCHER_FLOORS = "command_line hosts\nagent\nstore\ncontrol\noutput probe\nstarters\ndiagnostics placement\nelastic"
LAUNCHER_FLOOR = {folder: floor for floor, line in enumerate(LAUNCHER_FLOORS.split("\n")) for folder in line.split()}
LAUNCHER_FLOOR[""] = 8
LAUNCHER_MAY_IMPORT = ("launcher", "config", "errors", "system", "security.framing", "security.handshake")
LAUNCHER_MAY_IMPORT += ("security.job_secret", "security.connection_limits", "rendezvous.discovery")  # no NumPy
LAUNCHER_MAY_IMPORT += ("rendezvous.slurm", "trace.directory")


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


def imported(path, types=True):
    """Dotted names that a module imports anywhere in its text, relative ones resolved."""
    package = ["hvdlite", *path.relative_to(ROOT).parts[:-1]]
    package = package[1:] if path.is_relative_to(ROOT / "hvdlite") else package
    body = tree(path).body
    kept = [node for node in body if types or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    for node in (inner for outer in kept for inner in ast.walk(outer)):
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
            wrong.append(f"{name(path)}: give it a floor in tests/project/test_floors.py")
            continue
        if here == "__init__":
            continue  # it hands out names lazily; that it loads nothing is tested where it is imported
        for dotted in imported(path):
            if not dotted.startswith("hvdlite"):
                continue
            there = module_floor(dotted)
            if there == here or dotted == "hvdlite.__version__":
                continue
            allowed = any(f"{dotted}.".startswith(f"hvdlite.{each}.") for each in LAUNCHER_MAY_IMPORT)
            too_much = here == "launcher" and not allowed
            if PYTHON_FLOOR[there] >= PYTHON_FLOOR[here] or too_much:
                wrong.append(
                    f"{name(path)} (floor {PYTHON_FLOOR[here]}) imports {dotted} (floor {PYTHON_FLOOR[there]})"
                )
    complain(wrong)


def launcher_room(dotted):
    """The folder of launcher/ that hvdlite.launcher.x.y lies in."""
    parts = dotted.split(".")[2:]
    return parts[0] if parts and parts[0] in LAUNCHER_FLOOR else ""


def test_rooms_of_the_launcher_point_down():
    """Types aside: an import under TYPE_CHECKING makes nothing depend on anything."""
    wrong = []
    for path in files("launcher/**/*.py"):
        parts = path.relative_to(ROOT).parts
        here = parts[1] if len(parts) > 2 else ""
        for dotted in imported(path, types=False):
            there = launcher_room(dotted)
            outside = dotted.startswith("hvdlite.launcher.") and there != here and path.name != "remote.py"
            if outside and LAUNCHER_FLOOR[there] >= LAUNCHER_FLOOR[here]:
                wrong.append(f"{name(path)} (floor {LAUNCHER_FLOOR[here]}) imports {dotted}")
    complain(wrong)


def test_only_core_imports_the_extension():
    loaders = {name(path) for path in PYTHON_FILES if any("_cffi" in dotted for dotted in imported(path))}
    complain(sorted(loaders - {"hvdlite/_core/library.py"}))
