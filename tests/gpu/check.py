"""What only a GPU can show; tests/gpu/run starts it. Each check prints what it found; at the end stands a verdict for
each claim of issue 5 (machine.py): a part that did not run is called that, and not a pass.

one             every op and dtype through NCCL, beside NumPy, and figures of one rank (figures.py)
staged          two and four ranks on one GPU by way of the CPU: the same checks, rows that differ or are none, results
                fetched by a busy stream, beside and inside a capture of a CUDA graph
shared          two ranks on one GPU by an NCCL of 2.30 or later, if it permits that
several         two ranks, and as many as the greatest power of two of GPUs, by NCCL; by two devices of each rank where
                there are so many
pairs           figures of two ranks (figures.py): on two GPUs, and on one where NCCL permits that
death           of one rank in two: the other one's error and its free device within a second
sanitizer       compute-sanitizer, where it is installed, over one rank's checks

Arguments: names of parts (none: all of them), and "judge": figures that are missed, and parts that did not run, make
the exit code (Machine.code). That is for a machine that has nothing else to do.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from figures import figures, timed
from machine import CLAIMS, PARTS, SHARING, WORKED, Machine, jobs, tell

import hvdlite.torch as hvd
import hvdlite.torch.distributed  # noqa: F401

OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
DTYPES += ("float8_e4m3fn", "float8_e5m2")
FLOAT8_SINCE, FLOAT8_CAPABILITY = 22400, (9, 0)
TENSORS = 1000  # the first lane of one in a timeline


def expected(values, op, factor):
    """Of all ranks' values, in NumPy."""
    combine = {"Sum": sum, "Average": sum, "Product": lambda all_: np.prod(all_, axis=0)}
    if op in ("Min", "Max"):
        return (np.min if op == "Min" else np.max)(values, axis=0)
    total = combine[op](values) * factor
    return total / len(values) if op == "Average" else total


def values_of(op, size):
    """What each rank gives: small whole numbers, so that every dtype holds every step of the result exactly."""
    if op == "Product":  # powers of two, and few of them
        return [1 + (np.arange(1000) + r) % 2 * (r < 4) for r in range(size)]
    return [(np.arange(1000) % 3 + r % 2) * (r < 4) for r in range(size)]  # float8 has no 17


def every_op_and_dtype():
    """On `values_of`. The names of all that was reduced, and what that was."""
    rank, size, done = hvd.rank(), hvd.size(), {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for op, number in OPS.items():
            for factor in (1.0, 2.0):
                if dtype == "bool" and (op == "Average" or factor != 1):
                    continue
                if op in ("Min", "Max", "Product") and factor != 1:
                    continue
                all_ = values_of(op, size)
                mine = torch.tensor(all_[rank]).to(kind).cuda()
                name = f"{dtype}.{op}.{factor:g}"
                got = hvd.allreduce(mine, op=number, prescale_factor=factor, name=name)
                assert got.is_cuda and got.dtype == kind
                due = [np.array(one, dtype=bool) for one in all_] if dtype == "bool" else all_
                wanted = np.asarray(expected(due, op, factor))
                wanted = np.trunc(wanted) if dtype.startswith(("int", "uint")) else wanted.astype(float)
                wanted = wanted != 0 if dtype == "bool" else wanted
                np.testing.assert_array_equal(
                    got.cpu().to(torch.float64).numpy(), wanted.astype(float), f"{dtype} {op}"
                )
                done[name] = dtype, op, factor
    return done


def every_kind():
    """Broadcast, allgather, alltoall, reducescatter, reduce, send and receive."""
    rank, size = hvd.rank(), hvd.size()
    one = torch.full((3,), float(rank), device="cuda")
    assert hvd.broadcast(one, size - 1).tolist() == [size - 1.0] * 3
    rows = hvd.allgather(torch.full((rank + 1, 2), rank, device="cuda"))
    assert rows.is_cuda and rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.alltoall(torch.arange(size, device="cuda") + 10 * rank).tolist() == [10 * r + rank for r in range(size)]
    part = hvd.reducescatter(torch.arange(2.0 * size, device="cuda"), op=hvd.Sum)
    assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    hvd.reduce(one, 0)
    if size > 1 and rank < 2:
        (hvd.send if rank == 0 else hvd.recv)(one, 1 - rank, name="one")
        assert one[0] == 0


def rows_that_differ():
    """Allgather, alltoall, gather and scatter, in every dtype, of rows that differ, and of none."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for step in range(4):  # the same memory of the core's comes back
            counts = [(r + step) % 3 * 1000 for r in range(size)]
            mine = torch.full((counts[rank], 5), rank % 2, dtype=kind, device="cuda")
            whole = hvd.allgather(mine)
            due = np.repeat(np.arange(size) % 2, counts)
            assert whole.is_cuda and whole.dtype == kind and whole.shape == (sum(counts), 5)
            np.testing.assert_array_equal(whole[:, 4].cpu().to(torch.float64).numpy(), due, dtype)
            splits = [(rank + to + step) % 3 for to in range(size)]
            rows, came = hvd.alltoall(torch.full((sum(splits), 2), rank % 2, dtype=kind, device="cuda"), splits)
            assert came.tolist() == [(r + rank + step) % 3 for r in range(size)]
            due = np.repeat(np.arange(size) % 2, came.tolist())
            np.testing.assert_array_equal(rows[:, 1].cpu().to(torch.float64).numpy(), due, dtype)
    several = hvd.grouped_allgather([torch.full((r + rank, 1), float(rank), device="cuda") for r in range(3)])
    assert [len(one) for one in several] == [size * r + size * (size - 1) // 2 for r in range(3)]
    got = hvd.gather(torch.full((rank + 1,), rank, device="cuda"), size - 1)
    assert got.is_cuda and got.tolist() == ([r for r in range(size) for _ in range(r + 1)] if rank == size - 1 else [])
    part = hvd.scatter(torch.arange(2.0 * size, device="cuda") if rank == 0 else None, 0)
    assert part.is_cuda and part.tolist() == [2.0 * rank, 2.0 * rank + 1]


def fetched_in_order():
    """Results of many allgathers lie in the same memory of the core's, and a busy stream copies them one by one."""
    slow, kept = torch.ones(4096, 4096, device="cuda"), []
    for step in range(30):
        slow = slow @ slow / 4096
        kept.append(hvd.allgather(torch.full((1000, 64), float(step + hvd.rank()), device="cuda"), name="again"))
    for step, whole in enumerate(kept):
        for rank, part in enumerate(whole.chunk(hvd.size())):
            assert bool((part == step + rank).all()), (step, rank)


def after_what_was_begun():
    """A long kernel writes the tensor; the collective must not read before."""
    slow = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        slow = slow @ slow / 4096
    value = slow[:1].sum() + hvd.rank()
    assert hvd.allreduce(value, op=hvd.Sum).item() == hvd.size() * 4096 + hvd.size() * (hvd.size() - 1) / 2


def beside_a_capture():
    """While collectives wait on the device, and the core asks how far they are, a stream is captured globally;
    and inside a capture a collective is refused."""
    slow, given = torch.ones(4096, 4096, device="cuda"), [torch.ones(1000 << i, device="cuda") for i in range(8)]
    kept, side, graph = torch.zeros(1000, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    kept.add_(0)  # its kernel is loaded now and not in the capture
    torch.cuda.synchronize()
    for _ in range(2000):
        slow.mul_(1.0)
    handles = [hvd.allreduce_async_(one, op=hvd.Sum, name=f"beside.{i}") for i, one in enumerate(given)]
    with torch.cuda.stream(side):
        graph.capture_begin()  # torch.cuda.graph would wait for the device first
        kept.add_(1)
        time.sleep(0.02)
        try:
            hvd.allreduce_async(kept, name="inside")
        except hvd.HvdError as error:
            assert "CUDA graph is being captured" in str(error)
        else:
            raise AssertionError("a collective became part of a graph")
        graph.capture_end()
    for handle in handles:
        hvd.synchronize(handle)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((kept == 1).all()) and all(bool((one == hvd.size()).all()) for one in given)


def two_devices():
    """Where there are enough of them, every rank uses two in turn, with one process set."""
    rank, size = hvd.rank(), hvd.size()
    if torch.cuda.device_count() < 2 * size:
        return
    for step in range(4):
        given = [torch.full((1000,), float(rank + i), device=f"cuda:{2 * rank + i % 2}") for i in range(10)]
        got = [hvd.allreduce_async(one, op=hvd.Sum, name=f"two.{step}.{i}") for i, one in enumerate(given)]
        for i, handle in enumerate(got):
            due = size * i + size * (size - 1) // 2
            assert bool((hvd.synchronize(handle) == due).all()), (step, i)
            torch.cuda.synchronize(given[i].device)


def as_torch_has_it():
    """torch.distributed over hvdlite: a Work makes the stream wait that is current in wait(), and so does a future."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    dist.init_process_group("hvdlite", init_method="hvdlite://")
    slow = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        slow = slow @ slow / 4096
    work = dist.all_reduce(mine := slow[0] * (rank + 1), async_op=True)
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            work.wait()
            assert bool((mine == total).all())
    future = dist.all_reduce(torch.full((1000,), rank + 1.0, device="cuda"), async_op=True).get_future()
    assert bool((future.then(lambda done: done.value()[0] * 2).wait() == 2 * total).all())
    given, whole, part = (torch.zeros(count, device="cuda") + rank for count in (1000, 1000 * size, 1000))
    dist.all_gather_into_tensor(whole, given)
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(1000)]
    dist.reduce_scatter_tensor(part, whole)
    assert bool((part == rank * size).all())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1).cuda())
    model(given[None] + 1).sum().backward()
    assert bool((model.module.weight.grad == (size + 1) / 2).all())
    torch.cuda.synchronize()
    assert work.is_completed()
    dist.destroy_process_group()


def beside_the_cpu():
    """Ranks that share a GPU: the bits of a large sum, and its time."""
    rows = torch.randn(4_000_000, generator=torch.Generator().manual_seed(hvd.rank()))
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mine = rows.to(kind)
        due, got = hvd.allreduce(mine), hvd.allreduce(mine.cuda())
        assert torch.equal(got.cpu(), due), kind
    there = mine.float().cuda()
    took = timed(lambda: hvd.allreduce_(there), 20)
    if hvd.rank() == 0:
        print(f"16 MB over {hvd.size()} ranks on one GPU by way of the CPU: {took * 1e3:.3f} ms", flush=True)


@contextlib.contextmanager
def carried(seen):
    """Afterwards `seen` has (tensor, what has carried it) of each collective of the block, as one rank's timeline says:
    by way of the CPU goes what NCCL does not compute as hvdlite does (csrc/plane/nccl/calls.c), and the results are
    right either way, so a dtype that has lost its way to NCCL shows nowhere but here."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline")
        hvd.start_timeline(path)
        yield
        hvd.stop_timeline()
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
    titles = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    for row in rows:
        carrier = row.get("args", {}).get("plane")
        if row.get("tid", 0) >= TENSORS and carrier:
            seen.append((titles[row["tid"]].removeprefix("allreduce."), carrier))


def lost(seen, reductions, float8):
    """Names of what NCCL has to carry, and has not. reductions: names of allreduces of one rank, and for each (dtype,
    op, factor); of whatever else is seen all is NCCL's. float8: it adds such numbers."""
    due = {name for name, _ in seen} - set(reductions)
    for name, (dtype, _, factor) in reductions.items():
        if float8 and factor == 1 if dtype.startswith("float8") else factor == 1 or "float" in dtype:
            due.add(name)
    others = {name for name, carrier in seen if carrier != "nccl"}
    return sorted(due - ({name for name, _ in seen} - others))


def lets_ranks_share():
    """Does NCCL take several ranks on one GPU? Since 2.30, where this variable says so."""
    return os.environ.get(SHARING) == "1" and hvd.nccl_built() >= 23000


def adds_up(crowded, said):
    """Once, before all else. If NCCL does that for ranks that share a GPU, it has not refused them."""
    for _ in range(2):  # which way tensors go is told with the second one
        one = hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum)
    by_nccl = crowded and lets_ranks_share() and not any("hvdlite" in str(warned.message) for warned in said)
    if by_nccl and hvd.rank() == 0:
        torch.cuda.synchronize()
        print(WORKED, flush=True)
    assert one.tolist() == [hvd.size()] * 3


def every_check(seen):
    """The names of all that was reduced, and what that was."""
    with carried(seen) if hvd.size() == 1 else contextlib.nullcontext():
        done = every_op_and_dtype()
        every_kind()
    rows_that_differ()
    fetched_in_order()
    after_what_was_begun()
    beside_a_capture()
    two_devices()
    as_torch_has_it()
    return done


def as_rank(asked):
    """The program of each rank; `pair`: of each of two that NCCL joins and whose figures are wanted."""
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    crowded, seen, done = hvd.size() > torch.cuda.device_count(), [], {}
    staged = crowded and not lets_ranks_share()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adds_up(crowded, said)
        if "pair" not in asked:
            done = every_check(seen)
    texts = [str(one.message) for one in said if "hvdlite" in str(one.message)]
    assert bool(texts) == (staged and hvd.rank() == 0), texts
    if staged:
        print(*texts, flush=True)
        beside_the_cpu()
    way = "dtypes" if hvd.size() == 1 else f"staged{hvd.size()}" if staged else "shared" if crowded else "several"
    if hvd.rank() == 0 and done and way in CLAIMS:
        float8 = hvd.nccl_built() >= FLOAT8_SINCE and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
        gone = lost(seen, done, float8) if hvd.size() == 1 else []
        text = f"{hvd.size()} ranks: {len(done)} reductions and every kind hold"
        tell(way, not gone, text + f"; by way of the CPU, though NCCL computes them: {gone}" * bool(gone))
    if "figures" in asked or "pair" in asked:
        figures("one" if hvd.size() == 1 else way)
    hvd.shutdown()


def main(asked):
    """Runs the parts. The exit code says what came of it."""
    wrong = [one for one in asked if one != "judge" and one not in PARTS]
    if wrong:
        print(f"there is no part {wrong[0]!r}: {', '.join(PARTS)}, and judge")
        return 2
    parts = [one for one in PARTS if one in asked] or PARTS
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "NCCL", torch.cuda.nccl.version(), flush=True)
    machine = Machine()
    for part, *job in jobs(torch.cuda.device_count(), torch.cuda.nccl.version()):
        if part in parts:
            machine.job(*job)
    for part in [one for one in ("death", "sanitizer") if one in parts]:
        getattr(machine, part)()
    print("\nIssue 5, measured on this GPU:", *machine.summary(), sep="\n", flush=True)
    return machine.code("judge" in asked)


if __name__ == "__main__":
    sys.exit(as_rank(sys.argv) if sys.argv[1:2] == ["rank"] else main(sys.argv[1:]))
