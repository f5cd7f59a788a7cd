"""Profile of the layers of a PyTorch model, and stages of a model that is no list of layers.

`profile` measures as `hvdlite.parallel.profile` does, and gives the rows of a file of layers (layers.py); how a layer
could be cut over ranks (heads, sync) cannot be measured: write them into the file. `stages` traces a model with
torch.fx and cuts it with torch.fx's split_module: what skips a stage is handed on by the arguments of those between.

The profile is PipeDream's (Narayanan et al., SOSP 2019, section 3.1). PyTorch is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .search import Layer
from .table import PlanError


def profile(layers: Sequence[Any], sample: Any, repeats: int = 5) -> list[Layer]:
    """layers: modules, or functions that make one; sample: a micro-batch, a tensor or a tuple. A layer's name is its
    number, as `hvdlite.parallel.split` names it."""
    try:
        from ..parallel import profile as measured
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    found = measured(layers, sample, repeats)
    ms = ([1e3 * seconds for seconds in each] for each in (found.forward, found.backward))
    return [Layer(str(at), *row) for at, row in enumerate(zip(*ms, found.activations, found.weights, found.stash))]


def stages(model: Any, stage_of: Mapping[str, int]) -> Any:
    """A module whose children are the stages. stage_of: of modules' dotted names; what has none goes with the latest of
    its inputs. PlanError for a module that there is not, or that would need what a later stage makes."""
    try:
        from torch.fx import Node, symbolic_trace
        from torch.fx.passes.split_module import split_module
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    known = {name for name, _ in model.named_modules()}
    for name in stage_of:
        if name not in known:
            raise PlanError(f"the model has no module {name!r} for stage {stage_of[name]} [HVD005]")
    traced, at = symbolic_trace(model), dict[Node, int]()
    for node in traced.graph.nodes:
        above = str(node.target) if node.op == "call_module" else ""
        while above and above not in stage_of:
            above = above.rpartition(".")[0]
        own = stage_of.get(above, 0)
        at[node] = max([own, *(at[each] for each in node.all_input_nodes)])
        if above and own < at[node]:
            raise PlanError(f"module {node.target} is in stage {own}, but needs an output of stage {at[node]} [HVD005]")
    return split_module(traced, model, lambda node: at[node])


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    if (error.name or "").partition(".")[0] != "torch":
        return error
    return ModuleNotFoundError(
        "profiles and stages need the package PyTorch: pip install torch (or hvdlite[torch]) [HVD807]", name="torch"
    )
