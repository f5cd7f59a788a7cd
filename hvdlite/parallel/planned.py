"""Plans of `hvdlite-plan auto` for Pipeline: the cut, the mesh and the schedule in a file.

    plan = parallel.planned("parallel.json")
    mesh = hvd.Mesh(**plan.shape)
    stage = parallel.split(layers, mesh, plan.balance)
    pipe = parallel.Pipeline(stage, optimizer, mesh, loss, plan.micro_batches, plan.schedule)

`kinds` says of each layer whether it is the same on all ranks of the axis tp ("dp") or cut over them ("tp2"), as
ColumnLinear, RowLinear and `parallelize` do. The format is `hvdlite-parallel-1`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "hvdlite-parallel-1"
BYTES_MAX, NUMBER_MAX = 16 << 20, 1 << 20
SCHEDULES = ("1f1b", "gpipe")


class Planned(NamedTuple):
    """balance: layers of each stage. shape: the lengths of the axes dp, pp and tp. kinds: by layer."""

    balance: list[int]
    micro_batches: int
    schedule: str
    shape: dict[str, int]
    kinds: list[str]


def planned(path: str | Path) -> Planned:
    """Read the cut, mesh and schedule that ``hvdlite-plan auto`` has written.

    Args:
        path (str or Path): the file, of the format ``hvdlite-parallel-1``.

    Returns:
        Planned: ``balance``, ``micro_batches``, ``schedule``, ``shape`` (axes dp, pp and tp) and ``kinds`` of layers.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.

    Example:
        >>> from hvdlite import parallel
        >>> plan = parallel.planned("parallel.json")  # doctest: +SKIP
        >>> # skipped in tests: it needs the file
    """
    with open(path, "rb") as file:
        text = file.read(BYTES_MAX + 1)
    try:
        plan = json.loads(text) if len(text) <= BYTES_MAX else None
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        return _checked(plan["micro_batches"], plan["schedule"], plan["shape"], plan["stages"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a plan for hvdlite.parallel: {problem[:200]} [HVD013]") from None


def _checked(micro: Any, schedule: Any, shape: Any, stages: Any) -> Planned:
    if not isinstance(shape, dict) or set(shape) != {"dp", "pp", "tp"}:
        raise ValueError("shape must have the axes dp, pp and tp")
    for what, number in {"micro_batches": micro, **shape}.items():
        if type(number) is not int or not 1 <= number <= NUMBER_MAX:
            raise ValueError(f"{what} is {repr(number)[:40]}: it must be a whole number of 1 to {NUMBER_MAX}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}: it must be {' or '.join(SCHEDULES)}")
    if not isinstance(stages, list) or len(stages) != shape["pp"]:
        raise ValueError(f"stages must be a list of {shape['pp']}, as pp says")
    balance: list[int] = []
    kinds: list[str] = []
    for number, stage in enumerate(stages):
        first, end = stage["layers"]
        if first != len(kinds) or type(end) is not int or end - first != len(stage["kinds"]) or end <= first:
            raise ValueError(f"stage {number} has the layers [{first}, {end}) and {len(stage['kinds'])} kinds")
        balance.append(end - first)
        kinds += stage["kinds"]
    wrong = [kind for kind in kinds if kind not in ("dp", f"tp{shape['tp']}")]
    if wrong:
        raise ValueError(f"a layer is {wrong[0]!r}: it must be 'dp' or 'tp{shape['tp']}'")
    return Planned(balance, micro, schedule, shape, kinds)
