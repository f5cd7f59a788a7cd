"""A rank's program: runs the bodies of `@as_ranks` tests of the modules that are named, one after the other.

So the suite of collectives that one host passes is the one that several hosts and every plane pass. All ranks run the
same cases in the same order. Cases of a size that is not this job's are left out, unless the job is larger than any
that they name and they name several: those are written for any size. ONE_HOST's are true on one host only, NO_MPI's
where no MPI has started the job. The first failure ends the job: others wait for it.
"""

import importlib
import itertools
import sys
import traceback

import ranks  # noqa: F401  (the folders of test modules are on the path then)

import hvdlite as hvd

ONE_HOST = {"test_topology"}
NO_MPI = {"test_sets_of_init_come_back_after_shutdown"}


def cases(module, size):
    """(name, arguments) of each case of a module for a job of this size."""
    for name, test in vars(module).items():
        body = getattr(test, "body", None)
        if body is None or (name in ONE_HOST and hvd.local_size() < size) or (name in NO_MPI and hvd.mpi_enabled()):
            continue
        given = {mark.args[0]: mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"}
        sizes = given.pop("world")
        if size not in sizes and (size < max(sizes) or len(sizes) < 3):
            continue
        columns = [[_named(names, value) for value in values] for names, values in given.items()]
        for row in itertools.product(*columns):
            arguments = {key: value for cell in row for key, value in cell.items()}
            if set(arguments) == set(body.__code__.co_varnames[: body.__code__.co_argcount]):
                yield name, body, arguments


def _named(names, value):
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    values = getattr(value, "values", value) if hasattr(value, "marks") else value
    return dict(zip(names, values if len(names) > 1 or hasattr(value, "marks") else [values]))


def run(modules):
    """All cases of these modules."""
    hvd.init()
    count = 0
    for module in modules:
        for name, body, arguments in cases(importlib.import_module(module), hvd.size()):
            try:
                body(**arguments)
            except BaseException as error:
                if type(error).__name__ == "Skipped":
                    continue
                traceback.print_exc()
                print(f"rank {hvd.rank()} failed in {module}.{name}{arguments}", flush=True)
                sys.exit(1)
            hvd.init()  # a test may have shut down
            count += 1
    print(f"{count} cases passed", flush=True)


if __name__ == "__main__":
    run(sys.argv[1:])
