"""Which way did collectives go: by NCCL, or by way of the CPU? And which had to go by NCCL?

The core's own timeline says of each tensor what has carried it. By way of the CPU goes what NCCL does not compute as
hvdlite does (csrc/plane/nccl/calls.c), and the results are right either way: so a dtype that has lost its way to NCCL
shows nowhere but here.
"""

import json
import os
import tempfile

import torch

import hvdlite.torch as hvd

FLOAT8_SINCE, FLOAT8_CAPABILITY = 22400, (9, 0)
TENSORS = 1000  # the first lane of one in a timeline


def adds_float8():
    """Does this NCCL, on this device?"""
    return hvd.nccl_built() >= FLOAT8_SINCE and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY


def by_nccl(dtype, op, factor, size, float8):
    """Must NCCL reduce this? float8: it adds such numbers."""
    scaled = factor != 1 or (op == "Average" and size > 1)
    if dtype.startswith("float8"):
        return float8 and not scaled
    return not scaled or "float" in dtype


class Ways:
    """For a block: afterwards `seen` has (tensor, kind, what has carried it) of each collective of it."""

    def __enter__(self):
        self.seen = []
        self._folder = tempfile.TemporaryDirectory()
        self._path = os.path.join(self._folder.name, "timeline")
        hvd.start_timeline(self._path)
        return self

    def __exit__(self, *_):
        hvd.stop_timeline()
        own = self._path if hvd.rank() == 0 else f"{self._path}.rank-{hvd.rank()}.json"
        with open(own, encoding="utf-8") as file:
            rows = json.load(file)
        self._folder.cleanup()
        titles = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
        assert not any(row.get("name") == "hvdlite_lost_events" for row in rows), "the timeline has holes"
        for row in rows:
            carrier = row.get("args", {}).get("plane")
            if row.get("tid", 0) >= TENSORS and carrier:
                self.seen.append((titles.get(row["tid"], "?").removeprefix("allreduce."), row["name"], carrier))


def judged(ways, reductions, size, float8):
    """(whether all went as they must, what went by way of the CPU in words).

    reductions: names of allreduces, and for each (dtype, op, factor); of whatever else is seen all is NCCL's.
    """
    due = {name: by_nccl(*what, size, float8) for name, what in reductions.items()}
    other = [(name, kind) for name, kind, carrier in ways.seen if carrier != "nccl"]
    lost = [f"{name} ({kind.lower()})" for name, kind in other if due.get(name, True)]
    missing = sorted(set(due) - {name for name, _, _ in ways.seen})
    rightly = sorted({name for name, _ in other if not due.get(name, True)})
    text = f"by way of the CPU: {', '.join(rightly) or 'none'}"
    if lost:
        text += f"; and these, which NCCL computes: {', '.join(lost)}"
    if missing:
        text += f"; not seen: {', '.join(missing)}"
    return not lost and not missing, text
