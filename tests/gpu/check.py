"""What only a GPU can show; tests/gpu/run starts it. Each check prints what it found; the exit code is 1 if one fails.

one rank        every op and dtype through NCCL, beside NumPy; a 4 KB allreduce beside NCCL's own call, without
                PyTorch between (raw.py); 161 gradients and a step of 162 of them, beside PyTorch's NCCL and
                DistributedDataParallel; what a step of 100 M parameters takes beside its computation alone
two, four       on one GPU by way of the CPU, and two by an NCCL of 2.30 or later if it permits that (told, not judged);
                on as many by NCCL: the same, rows that differ or are none, and results fetched by a busy stream
packing         of 161 gradients beside the device's own copy (tests/c/bench_gpu_pack.c)
sanitizer       compute-sanitizer over packing and over one rank's checks, where it is installed

Figures are printed beside what issue 5 wants of them. They are judged only with "judge" behind the command, on a
machine that has nothing else to do.
"""

import os
import shutil
import subprocess
import sys
import time
import warnings

import numpy as np
import raw
import torch

import hvdlite.torch as hvd

OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
LAUNCH = "import sys; from hvdlite.launcher.cli import main; sys.exit(main())"
RESNET_TENSORS, RESNET_ELEMENTS = 161, 25_557_032
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
HERE = os.path.dirname(os.path.abspath(hvd.__file__))
BENCH = os.path.join(os.path.dirname(os.path.dirname(HERE)), "bench_gpu_pack")
late = []


def expected(values, op, factor):
    """Of all ranks' values, in NumPy."""
    combine = {"Sum": sum, "Average": sum, "Product": lambda all_: np.prod(all_, axis=0)}
    if op in ("Min", "Max"):
        return (np.min if op == "Min" else np.max)(values, axis=0)
    total = combine[op](values) * factor
    return total / len(values) if op == "Average" else total


def every_op_and_dtype():
    """Small whole numbers, so that every dtype holds them exactly."""
    rank, size, done = hvd.rank(), hvd.size(), 0
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for op, number in OPS.items():
            for factor in (1.0, 2.0):
                if dtype == "bool" and (op == "Average" or factor != 1):
                    continue
                if op in ("Min", "Max", "Product") and factor != 1:
                    continue
                all_ = [np.arange(1000) % 3 + r % 2 for r in range(size)]
                mine = torch.tensor(all_[rank]).to(kind).cuda()
                got = hvd.allreduce(mine, op=number, prescale_factor=factor)
                assert got.is_cuda and got.dtype == kind
                due = [np.array(one, dtype=bool) for one in all_] if dtype == "bool" else all_
                wanted = np.asarray(expected(due, op, factor))
                wanted = np.trunc(wanted) if dtype.startswith(("int", "uint")) else wanted.astype(float)
                wanted = wanted != 0 if dtype == "bool" else wanted
                np.testing.assert_array_equal(
                    got.cpu().to(torch.float64).numpy(), wanted.astype(float), f"{dtype} {op}"
                )
                done += 1
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


def timed(call, times):
    """Seconds of one call: the median."""
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[times // 2]


def judged(what, value, limit, unit):
    """Prints a figure beside its limit, which `late` remembers if it is missed."""
    print(f"{what}: {value:.3f} {unit}, at most {limit:.3f}{'' if value <= limit else '  MISSED'}", flush=True)
    if value > limit:
        late.append(what)


def a_model(layers, width):
    """Of two tensors a layer."""
    torch.manual_seed(0)
    parts = [one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts).cuda()


def a_step(model, optimizer, batch):
    """Forward, backward, update."""

    def step():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def plain(model):
    """An optimizer that does nothing with gradients but use them."""
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def steps():
    """Whole steps: ours, DistributedDataParallel's, and none's."""
    batch = torch.randn(64, 400, device="cuda")
    model, theirs = a_model(81, 400), torch.nn.parallel.DistributedDataParallel(a_model(81, 400))
    mine = hvd.DistributedOptimizer(plain(model), model.named_parameters())
    for _ in range(2):  # the first round warms up
        ours, ddp = (timed(step, 50) for step in (a_step(model, mine, batch), a_step(theirs, plain(theirs), batch)))
    judged("a step of 162 gradients, beside DistributedDataParallel's", ours * 1e3, ddp * 1e3, "ms")
    large, alone = a_model(24, 2048), a_model(24, 2048)  # 100 M parameters
    batch = torch.randn(4096, 2048, device="cuda")
    mine = hvd.DistributedOptimizer(plain(large), large.named_parameters())
    for _ in range(2):
        ours, bare = (timed(step, 30) for step in (a_step(large, mine, batch), a_step(alone, plain(alone), batch)))
    judged("a step of 100 M parameters, beside its computation", ours * 1e3, 1.05 * bare * 1e3, "ms")


def figures():
    """Beside PyTorch's own NCCL, alone in its process group."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("nccl", rank=0, world_size=1)
    small = torch.ones(1024, device="cuda")
    each = RESNET_ELEMENTS // RESNET_TENSORS
    gradients = [torch.ones(each, device="cuda") for _ in range(RESNET_TENSORS)]
    for _ in range(2):  # the first round warms up
        ours = timed(lambda: hvd.allreduce_(small, op=hvd.Sum, name="small"), 200)
        theirs = timed(lambda: dist.all_reduce(small), 200)
        bare = timed(raw.allreduce_of(small), 200)
        step = timed(lambda: hvd.grouped_allreduce_(gradients, op=hvd.Sum, name="step"), 20)
        step_theirs = timed(lambda: [dist.all_reduce(one) for one in gradients], 20)
    judged("4 KB allreduce, beside NCCL's own call and 10 us", ours * 1e6, bare * 1e6 + 10, "us")
    print(f"PyTorch's NCCL: {theirs * 1e6:.3f} us, NCCL's own call: {bare * 1e6:.3f} us", flush=True)
    print(f"{RESNET_TENSORS} gradients: {step * 1e3:.3f} ms, PyTorch's NCCL one by one {step_theirs * 1e3:.3f} ms")
    steps()
    dist.destroy_process_group()


def lets_ranks_share():
    """Does NCCL take several ranks on one GPU? Since 2.30, where this variable says so."""
    return os.environ.get(SHARING) == "1" and hvd.nccl_built() >= 23000


def as_rank():
    """The program of each rank."""
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = every_op_and_dtype()
        every_kind()
        rows_that_differ()
        fetched_in_order()
        after_what_was_begun()
    shared = hvd.size() > torch.cuda.device_count() and not lets_ranks_share()
    texts = [str(one.message) for one in said if "hvdlite" in str(one.message)]
    assert bool(texts) == (shared and hvd.rank() == 0), texts
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {done} reductions and every kind hold", *texts, flush=True)
    if hvd.size() == 1 and "figures" in sys.argv:
        figures()
    hvd.shutdown()
    sys.exit(3 if late and "judge" in sys.argv else 0)


def told(what, line):
    """Runs a command. 1 if it fails; 77 is a skip."""
    code = subprocess.run(line, timeout=540).returncode
    print(f"{what}: {'ok' if code == 0 else 'skipped' if code == 77 else f'FAILED ({code})'}", flush=True)
    return int(code not in (0, 77))


def main():
    """Starts the ranks. 1 if a check fails."""
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "NCCL", torch.cuda.nccl.version(), flush=True)
    failed = told("packing", [BENCH])
    rank = [sys.executable, __file__, "rank", *sys.argv[1:]]
    for size in sorted({1, 2, 4, torch.cuda.device_count()}):
        more = ["figures"] if size == 1 else []
        failed |= told(f"{size} ranks", [sys.executable, "-c", LAUNCH, "-np", str(size), *rank, *more])
    if torch.cuda.device_count() == 1 and torch.cuda.nccl.version() >= (2, 30):
        os.environ[SHARING] = "1"
        told("2 ranks on one GPU by NCCL, if it permits that", [sys.executable, "-c", LAUNCH, "-np", "2", *rank])
        del os.environ[SHARING]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer: skipped, it is not installed")
        return failed
    checked = [sanitizer, "--error-exitcode", "9", "--target-processes", "all"]
    failed |= told("compute-sanitizer, packing", [*checked, BENCH])
    return failed | told("compute-sanitizer, 1 rank", [*checked, *rank])


if __name__ == "__main__":
    sys.exit(as_rank() if sys.argv[1:2] == ["rank"] else main())
