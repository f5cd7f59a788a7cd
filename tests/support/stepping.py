"""Files of steps as ranks write them, made up: so many ranks, steps and hosts, with one rank late in a known way."""

import json
from pathlib import Path

MS = 1_000_000
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>bold</b>"


def head(rank, size, host="a", offset=0):
    clock = None if offset is None else {"offset_ns": offset, "error_ns": 1000}
    return {"format": "hvdlite-steps-1", "rank": rank, "size": size, "host": host, "clock": clock}


def step(number, begin, computes=40, data=2, arrives_last=60, every=10, names=("layer.weight",), memory=10**9):
    """One step of a job in which the last rank has submitted all at `arrives_last` ms, and all are done 10 ms later."""
    ends = arrives_last + 10
    line = {
        "step": number, "t": begin, "step_ns": ends * MS, "compute_ns": (computes + 2) * MS,
        "exposed_ns": (ends - 2 - data - computes) * MS, "negotiation_ns": 3 * MS, "data_wait_ns": data * MS,
        "optimizer_ns": 2 * MS, "bytes": {"shm": 12 << 20}, "messages": {"shm": 12},
        "arrived_ns": begin + (data + computes) * MS,
    }  # fmt: skip
    if number % every == 0:
        line["buckets"] = [
            {"tensors": 14, "bytes": 1 << 20, "start": begin + (20 + 3 * i) * MS, "end": begin + (22 + 3 * i + i) * MS,
             "plane": "shm", "names": [f"{name}.{i}" for name in names]}
            for i in range(12)
        ]  # fmt: skip
        line["memory"] = {"cpu": memory}
    return line


def write(folder, size, steps, late=None, offsets=None, **more):
    """late: this rank's data takes 41 ms longer than the others' in 84 of 100 steps. offsets: of each rank's clock."""
    Path(folder).mkdir(exist_ok=True)
    for rank in range(size):
        offset = (offsets or [0] * size)[rank]
        with open(Path(folder) / f"rank-{rank}.steps.jsonl", "w") as file:
            file.write(json.dumps(head(rank, size, "ab"[rank % 2], offset)) + "\n")
            begin = 10**12 - (offset or 0)
            for number in range(1, steps + 1):
                slow = late is not None and number % 25 >= 4
                ends = 83 if slow else 42
                line = step(number, begin, data=43 if slow and rank == late else 2, arrives_last=ends, **more)
                file.write(json.dumps(line) + "\n")
                begin += line["step_ns"]
