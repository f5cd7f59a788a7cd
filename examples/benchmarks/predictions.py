"""How far off is `hvdlite-trace predict`? Records 2 ranks, predicts 4 and 8, then measures them; 16 cases, 3 networks.

    sudo python examples/benchmarks/predictions.py [--json FILE]          10 minutes; needs iproute2 (ip, tc)

Each job runs in a network namespace of its own, whose loopback passes so many Mbit/s (a token bucket): one medium for
all ranks, each of which is a host of its own. Computing is sleeping, so that more ranks than processors are possible. A
prediction sees the recording of two ranks and the settings of the case, and nothing else.

    python examples/benchmarks/predictions.py shm                          the same with PyTorch's computing, ranks =
    processors

As `... predictions.py job ...` this file is the training script that is recorded: layers that sleep (or multiply
matrices), whose gradients are submitted in runs, as hooks of an optimizer do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

NETWORKS = {  # Mbit/s: layers, KB of each, submitted together, ms that a layer sleeps forward
    200: (12, 256, 3, 3.0),
    400: (8, 1024, 4, 3.0),
    1000: (16, 512, 2, 3.0),
}
HIDDEN = (1000, (8, 256, 1, 9.0))  # computing hides communication
SETTINGS = {  # how the larger job differs: words of hvdlite-run, words of the job, what is asked of the prediction
    "plain": ([], [], {}),
    "fp16": ([], ["--half"], {"wire": "fp16"}),
    "fusion": (["--fusion-threshold-mb", "1"], [], {"fusion_mb": 1.0}),
}
BURST = "burst 256kb latency 400ms"


def job(words):
    """The training script."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("kilobytes", 1024), ("runs", 1), ("steps", 30), ("sleep-ms", 3.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name in ("half", "work", "apart"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args(words)
    if asked.apart:  # a host of its own for each rank
        rank, size = os.environ["HVDLITE_RANK"], os.environ["HVDLITE_SIZE"]
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            del os.environ[name]
        os.environ.update({
            "HVDLITE_HOST_ID": f"host {rank}", "HVDLITE_LOCAL_RANK": "0", "HVDLITE_LOCAL_SIZE": "1",
            "HVDLITE_CROSS_RANK": rank, "HVDLITE_CROSS_SIZE": size,
        })  # fmt: skip
    import numpy as np

    import hvdlite as hvd

    hvd.init()
    kind = np.float16 if asked.half else np.float32
    gradients = [np.ones(asked.kilobytes * 256, kind) for _ in range(asked.layers)]
    compute = worker(asked.sleep_ms) if asked.work else lambda times: time.sleep(times * asked.sleep_ms / 1e3)
    for _ in range(asked.steps):
        flying, held = [], []
        for _ in range(asked.layers):
            compute(1)
        for number in reversed(range(asked.layers)):
            compute(2)
            held.append(number)
            if len(held) == asked.runs or number == 0:
                flying += [hvd.allreduce_async_(gradients[k], name=f"g{k}") for k in held]
                held = []
        for handle in flying:
            hvd.synchronize(handle)
        hvd.stats_step()


def worker(ms):
    """Computing that needs a processor: products of matrices with PyTorch, about so many ms for times=1."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)

    def compute(times):
        for _ in range(int(times * ms * 2)):
            matrix @ matrix

    return compute


def run(ranks, folder, rate, words, flags=()):
    """Records a job of so many ranks."""
    command = [sys.executable, "-m", "hvdlite.launcher", "-np", str(ranks), *flags, "--record", folder]
    command += [sys.executable, os.path.abspath(__file__), "job", *words]
    if rate is not None:
        shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate}mbit {BURST}"
        command = ["unshare", "-n", "sh", "-c", f'{shape} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def words_of(shape, apart=True):
    layers, kilobytes, runs, sleep_ms = shape
    said = ["--layers", layers, "--kilobytes", kilobytes, "--runs", runs, "--sleep-ms", sleep_ms]
    return [str(word) for word in said] + ["--apart"] * apart


def shaped(rows):
    """The 16 cases."""
    from hvdlite import predict

    every = [*((4, name) for name in SETTINGS), (8, "plain"), (8, "fp16")]
    cases = [(rate, shape, every) for rate, shape in NETWORKS.items()]
    cases.append((*HIDDEN, [(4, "plain")]))
    with tempfile.TemporaryDirectory() as folder:
        for number, (rate, shape, larger) in enumerate(cases):
            small = os.path.join(folder, f"{number}-2")
            run(2, small, rate, words_of(shape))
            recorded = predict.load(small)
            for ranks, name in larger:
                flags, words, asked = SETTINGS[name]
                predicted = recorded.step(ranks, medium="bus", **asked)
                large = os.path.join(folder, f"{number}-{ranks}-{name}")
                run(ranks, large, rate, words_of(shape) + words + ["--steps", "20"], flags)
                tell(rows, rate, ranks, name, recorded, predicted, large)


def in_memory(rows):
    """PyTorch's computing on as many ranks as processors; and on more, which no prediction promises."""
    from hvdlite import predict

    cores = len(os.sched_getaffinity(0))
    shape = (8, 1024, 1, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        alone, small = os.path.join(folder, "1"), os.path.join(folder, "2")
        for ranks, where in ((1, alone), (2, small)):
            run(ranks, where, None, [*words_of(shape, False), "--work", "--steps", "150"])
        both = predict.load(small)
        for ranks in sorted({2, cores, 2 * cores}):
            large = os.path.join(folder, f"{ranks} again")
            run(ranks, large, None, [*words_of(shape, False), "--work", "--steps", "150"])
            name = "PyTorch" + (", more ranks than processors" if ranks > cores else "")
            tell(rows, None, ranks, name, both, both.step(ranks), large)


def tell(rows, rate, ranks, name, recorded, predicted, large):
    from hvdlite import predict

    took = float(predict.load(large).recording.step_ns.mean()) / 1e6
    row = {
        "mbit": rate, "ranks": ranks, "setting": name, "recorded_ms": recorded.recording.step_ns.mean() / 1e6,
        "predicted_ms": predicted.ms, "low": predicted.low, "high": predicted.high, "measured_ms": took,
        "error": predicted.ms / took - 1, "confidence": predicted.confidence,
    }  # fmt: skip
    rows.append(row)
    said = f"{rate or 'shm':>5} {ranks:2d} ranks {name:<36} recorded {row['recorded_ms']:7.1f}  predicted"
    said += f" {predicted.ms:7.1f} ({predicted.low:.1f} to {predicted.high:.1f})  measured {took:7.1f} ms"
    print(f"{said}  {100 * row['error']:+.1f} %", flush=True)


def summary(rows):
    """Errors, and whether settings of one network come in the order that was predicted."""
    errors = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} cases: mean error {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %")
    pairs = wrong = 0
    for a in rows:
        for b in rows:
            same = (a["mbit"], a["ranks"]) == (b["mbit"], b["ranks"]) and a["recorded_ms"] == b["recorded_ms"]
            if same and a["measured_ms"] > 1.05 * b["measured_ms"]:
                pairs += 1
                wrong += a["predicted_ms"] <= b["predicted_ms"]
    print(f"{pairs} pairs of settings differ by more than 5 %: {pairs - wrong} in the predicted order")


def main():
    if sys.argv[1:2] == ["job"]:
        return job(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("shaped", "shm"), default="shaped")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    rows = []
    (shaped if asked.what == "shaped" else in_memory)(rows)
    summary(rows)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
