"""What does the docstring of a public name say, and do its examples print what they show?

`public(module)` gives the names that a reference page has: those of `__all__`, or what the module defines itself, and
the public methods of classes. `faults(name, thing)` compares the sections (Google style, as sphinx.ext.napoleon reads
them) with the signature. `tried(...)` runs the examples on this rank; all ranks must call it in the same order. An
expected line that ends with `# rank 1` is for that rank only.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from typing import Any

SECTIONS = ("Args", "Returns", "Raises", "Example", "Yields", "Attributes")
OF_RANK = re.compile(r"^(.*?)\s*# rank (\d+)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# They answer from what is known, and cannot fail.
NEVER_RAISES = {
    "ccl_built",
    "ddl_built",
    "get_handler_registry",
    "gloo_built",
    "gloo_enabled",
    "is_initialized",
    "mpi_built",
    "mpi_enabled",
    "rocm_built",
    "seeded",
    "set_handler_registry",
    "step",  # of hvdlite.autotune
    "hvdlite.aggregation.operation.stats",
}
RETURNED = {"Handle"}  # classes that calls return, and that users do not construct
# Modules whose names are documented, and what `hvd` means in their examples.
MODULES = {
    "hvdlite.numpy": "hvdlite",
    "hvdlite.torch": "hvdlite.torch",
    "hvdlite.aggregation": "hvdlite",
    "hvdlite.autotune": "hvdlite",
    "hvdlite.data": "hvdlite",
    "hvdlite.elastic": "hvdlite",
    "hvdlite.torch.elastic": "hvdlite.torch",
    "hvdlite.parallel": "hvdlite.torch",
    "hvdlite.plan": "hvdlite",
    "hvdlite.predict": "hvdlite",
    "hvdlite.ps": "hvdlite",
    "hvdlite.rpc": "hvdlite",
    "hvdlite.jax": "hvdlite.jax",
    "hvdlite.jax.elastic": "hvdlite.jax",
    "hvdlite.tensorflow": "hvdlite.tensorflow",
    "hvdlite.tensorflow.elastic": "hvdlite.tensorflow",
    "hvdlite.keras": "hvdlite.keras",
    "hvdlite.keras.callbacks": "hvdlite.keras",
    "hvdlite.keras.elastic": "hvdlite.keras",
}


def public(module_name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name below the module, object), of functions, classes and public methods that are defined by hvdlite."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", None) or vars(module):
        thing = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(thing) or not callable(thing):
            continue
        if not (getattr(thing, "__module__", "") or "").startswith("hvdlite"):
            continue
        if not hasattr(module, "__all__") and thing.__module__ != module_name:
            continue
        yield name, thing
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            theirs = [base for base in thing.__mro__ if not base.__module__.startswith("hvdlite")]
            for part, method in vars(thing).items():
                overrides = any(part in vars(base) for base in theirs)  # a framework documents it
                if not part.startswith("_") and callable(getattr(method, "__func__", method)) and not overrides:
                    yield f"{name}.{part}", getattr(thing, part)


def cleandoc(thing: Any) -> str:
    """The docstring without its indent; "" where there is none."""
    return inspect.cleandoc(thing.__doc__ or "")


def sections(doc: str) -> dict[str, str]:
    """The text below each section's title; "" has what stands before the first."""
    parts = re.split(rf"^({'|'.join(SECTIONS)})s?:$", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def faults(name: str, thing: Any) -> list[str]:
    """What the docstring lacks."""
    doc = thing.__doc__ or ""
    found = sections(doc)
    wrong = [] if found[""].strip() else ["no summary"]
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return wrong
    if inspect.isclass(thing):
        wrong += [] if ">>> " in doc or "::\n" in doc else ["no example"]
        if "__init__" not in vars(thing) or hasattr(thing, "__dataclass_fields__") or name in RETURNED:
            return wrong
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return wrong
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    heads = re.findall(r"^ {4}([\w*][\w*, ]*?)(?: \(.*?\))?:", found.get("Args", ""), re.MULTILINE)
    told = {each for head in heads for each in head.replace("*", "").split(", ")}
    wrong += [f"Args lacks {p.name}" for p in given if p.name not in told]
    wrong += [f"Args has {each}, the signature has not" for each in told - set(signature.parameters)]
    if inspect.isclass(thing):
        return wrong
    if signature.return_annotation not in (None, "None", "NoReturn") and not {"Returns", "Yields"} & set(found):
        wrong.append("no Returns")
    if "." in name:  # a method: the class has the example
        return wrong
    if "Raises" not in found and not {name, f"{thing.__module__}.{name}"} & NEVER_RAISES:
        wrong.append("no Raises")
    return wrong if "Example" in found else [*wrong, "no Example"]


def text_for(module_name: str, doc: str) -> str:
    """The collectives of NumPy and PyTorch are one function with one text, whose arrays are tensors there."""
    return doc.replace("np.array(", "torch.tensor(") if module_name.startswith("hvdlite.torch") else doc


def tried(module_name: str, rank: int) -> list[str]:
    """Runs all examples of a module; reports of those that fail."""
    hvd = importlib.import_module(MODULES[module_name])
    names = {"hvd": hvd}
    wanted = {"hvdlite.torch": ("numpy as np", "torch"), "hvdlite.numpy": ("numpy as np",)}
    wanted |= dict.fromkeys(("hvdlite.jax", "hvdlite.jax.elastic"), ("numpy as np", "jax", "jax.numpy as jnp"))
    more = ("numpy as np", "tensorflow as tf") if "tensorflow" in module_name else ("numpy as np",)
    for each in wanted.get(module_name, ("numpy as np", "torch") if "torch" in MODULES[module_name] else more):
        exec(f"import {each}", names)
    # The names without a framework are shown with arrays of NumPy: TensorFlow's and Keras's modules do not try them.
    own = any(each in MODULES[module_name] for each in ("jax", "tensorflow", "keras"))
    shared = [thing for _, thing in public("hvdlite.numpy")] if own else []
    reports, seen = [], set()
    for name, thing in public(module_name):
        doc = thing.__doc__ or ""
        if ">>> " not in doc or doc in seen or thing in shared:
            continue
        seen.add(doc)
        test = doctest.DocTestParser().get_doctest(
            text_for(module_name, inspect.cleandoc(doc)), dict(names), f"{module_name}.{name}", None, 0
        )
        for example in test.examples:
            lines = [(OF_RANK.match(line), line) for line in example.want.splitlines()]
            mine = [found.group(1) if found else line for found, line in lines if not found or int(found[2]) == rank]
            example.want = "".join(line + "\n" for line in mine)
        said = io.StringIO()
        if doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.write).failed:
            reports.append(said.getvalue())
        if hvd.size() > 1:
            hvd.barrier()
    return reports
