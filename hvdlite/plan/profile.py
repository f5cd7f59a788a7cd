"""Profile of the layers of a PyTorch model, and stages of a model that is no list of layers.

`profile` measures as `hvdlite.parallel.profile` does, and gives the rows of a file of layers (layers.py); `profiles`
measures at several numbers of rows of the micro-batch, for layout.py. How a layer could be cut over ranks (heads, sync)
cannot be measured: write them into the file. `stages` traces a model with
torch.fx and cuts it with torch.fx's split_module: what skips a stage is handed on by the arguments of those between.

The profile is PipeDream's (Narayanan et al., SOSP 2019, section 3.1). PyTorch is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .layers import ROWS_MAX
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


def profiles(layers: Sequence[Any], sample: Any, rows: Sequence[int], repeats: int = 5) -> dict[int, list[Layer]]:
    """Measure the cost of each layer at several numbers of rows of the micro-batch, for ``layout_for``.

    Functions that make a layer are called anew for each number of rows.

    Args:
        layers (list): modules, or functions without arguments that make one.
        sample (torch.Tensor or tuple): the input, with at least as many rows as the most of ``rows``.
        rows (list of int): the numbers of rows of a micro-batch. Each is measured on the first rows of ``sample``.
        repeats (int): the number of runs, of which the median counts. Default: 5.

    Returns:
        dict: lists of Layer, by number of rows.

    Raises:
        ValueError: a number of rows is not valid, ``sample`` has too few rows, or an entry of ``layers`` makes no
            module.
        ModuleNotFoundError: PyTorch is missing.

    Example:
        >>> import torch
        >>> from hvdlite import plan
        >>> found = plan.profiles([torch.nn.Linear(2, 2)], torch.ones(4, 2), rows=(2, 4))
        >>> {rows: layers[0].activation for rows, layers in found.items()}
        {2: 16, 4: 32}
    """
    try:
        from ..parallel.structure import put_together, taken_apart
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    if not rows or any(type(each) is not int or not 1 <= each <= ROWS_MAX for each in rows):
        raise ValueError(
            f"rows {str(list(rows))[:80]} must be whole numbers of 1 to {ROWS_MAX}, and at least one of them [HVD008]"
        )
    tensors, form = taken_apart(sample, strict=False)
    least = min((t.shape[0] if t.dim() else 0 for t in tensors), default=0)
    if least < max(rows):
        raise ValueError(
            f"the sample has {least} rows, but a profile is of {max(rows)}: pass at least so many [HVD008]"
        )
    return {
        each: profile(layers, put_together([t[:each] for t in tensors], form), repeats) for each in sorted(set(rows))
    }


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
