"""Import finder for `horovod` and the modules below it, asked before all others.

For a row of the table it makes an empty package and fills it with the names of our modules; for a row of SAME it hands
out our module itself, and for one of HOLLOW an empty one whose names raise when they are called. Anything else below
`horovod` ends here, by a not-yet error or an ordinary ModuleNotFoundError: left to the other finders, files of a
Horovod that is installed would be mixed with ours.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ..errors import HvdNotYetError, HvdNotYetModuleError
from ..errors.codes import coded
from .names import HOLLOW, MADE_OF, ON_DEMAND, SAME, why_not

_ROOT = "horovod"
_ANY = importlib.metadata.DistributionFinder.Context()


class _Made(Loader):
    """Fills a new package with the names of others."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        sources = [importlib.import_module(source) for source in MADE_OF.get(module.__name__, ())]
        for source in reversed(sources):
            shown = getattr(source, "__all__", ())
            for name in dir(source):
                value = getattr(source, name)
                if not name.startswith("__") and (name in shown or not isinstance(value, ModuleType)):
                    setattr(module, name, value)
        if sources:
            first = sources[0]
            module.__doc__, module.__file__ = first.__doc__, first.__file__
            shown = getattr(first, "__all__", None)
            if shown is not None:
                module.__all__ = list(shown)  # type: ignore[attr-defined]
            version = getattr(first, "__version__", None)
            if version is not None:
                module.__version__ = version  # type: ignore[attr-defined]
        if module.__name__ in HOLLOW:
            _hollow_out(module)
        for child in (*MADE_OF, *SAME):
            if child.rpartition(".")[0] == module.__name__ and child not in ON_DEMAND:
                importlib.import_module(child)


class _Same(Loader):
    """Hands out a module that exists, and leaves it as it is."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the alias's in its place


def _hollow_out(module: ModuleType) -> None:
    """Gives a module every name that it has not; each is a class that raises when it is called."""

    def missing(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        def refuse(cls: type, *args: object, **kwargs: object) -> None:
            raise HvdNotYetError(
                f"this version of hvdlite has no {module.__name__}.{name}: start jobs with hvdlite-run [HVD246]"
            )

        return type(name, (), {"__new__": refuse, "__module__": module.__name__})

    module.__getattr__ = missing  # type: ignore[method-assign]


class _Finder(importlib.metadata.DistributionFinder):
    """Answers for `horovod` and below, for nothing else."""

    def __init__(self, front: str) -> None:
        self._front = front

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterator[importlib.metadata.Distribution]:
        """For importlib.metadata.version("horovod")."""
        if context.name in (None, _ROOT):
            yield from map(importlib.metadata.PathDistribution, Path(self._front).glob("*.dist-info"))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MADE_OF or fullname in HOLLOW:
            return ModuleSpec(fullname, _Made(), is_package=True)
        if fullname in SAME:
            return ModuleSpec(fullname, _Same(SAME[fullname]))
        if not fullname.startswith(_ROOT + "."):
            return None
        reason = why_not(fullname)
        if reason is not None:
            raise HvdNotYetModuleError(coded("HVD246", f"{fullname}: {reason}"), name=fullname)
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: hvdlite replaces horovod, and has no such module [HVD246]", name=fullname
        )


def install(front: str) -> None:
    """Makes `horovod` mean hvdlite in this process, from now on. ImportError if another `horovod` is in use already."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    present = sys.modules.get(_ROOT)
    file = getattr(present, "__file__", None)
    if present is not None and (file is None or os.path.dirname(os.path.abspath(file)) != front):
        raise ImportError(
            f"horovod has been imported from {file} already: import hvdlite.as_horovod before it [HVD809]"
        )
    finder = _Finder(front)
    sys.meta_path.insert(0, finder)
    spec = finder.find_spec(_ROOT, None)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_ROOT] = module
    spec.loader.exec_module(module)
