"""How far off is `hvdlite-trace predict`? Records 2 ranks, predicts 4 and 8, then measures them; 16 cases, 3 networks.

    sudo python examples/benchmarks/predictions.py [--json FILE]          10 minutes; needs iproute2 (ip, tc)

Each job runs in a network namespace of its own, whose loopback passes so many Mbit/s (a token bucket): one medium for
all ranks, each of which is a host of its own. Computing is sleeping, so that more ranks than processors are possible. A
prediction sees the recording of two ranks and the settings of the case, and nothing else.

    python examples/benchmarks/predictions.py models                       8 minutes; on a machine without other work

`models` trains three real models with PyTorch, one thread a rank: a perceptron and a convolutional network on digits,
a transformer on text. It records 2 ranks, and predicts and measures 2, 3 and 4 ranks, with two batch sizes and
with float16 on the wire: 21 values.

As `... predictions.py job ...` this file is the training script that is recorded: a model, or layers that sleep, whose
gradients are submitted in runs, as hooks of an optimizer do.
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
    for name in ("half", "apart"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--batch", type=float, default=1.0)
    asked = parser.parse_args(words)
    if asked.model:
        return train(asked)
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
    for _ in range(asked.steps):
        flying, held = [], []
        time.sleep(asked.layers * asked.sleep_ms / 1e3)
        for number in reversed(range(asked.layers)):
            time.sleep(2 * asked.sleep_ms / 1e3)
            held.append(number)
            if len(held) == asked.runs or number == 0:
                flying += [hvd.allreduce_async_(gradients[k], name=f"g{k}") for k in held]
                held = []
        for handle in flying:
            hvd.synchronize(handle)
        hvd.stats_step()


def mlp(torch, nn):
    """Digits of 8 x 8 pixels through three wide layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def cnn(torch, nn):
    """Digits of 8 x 8 pixels through two convolutions."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def gpt(torch, nn):
    """Characters of Python's own library, 32 at a time, through two layers of a transformer."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(128, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 128))


MODELS = {"mlp": (mlp, 256), "cnn": (cnn, 64), "gpt": (gpt, 8)}  # and samples in a batch of one rank


def train(asked):
    """Steps of a real model on real data."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    make, samples = MODELS[asked.model]
    model, samples = make(torch, nn), int(samples * asked.batch)
    if asked.model == "gpt":
        with open(argparse.__file__, "rb") as file:
            data = torch.tensor([min(c, 127) for c in file.read()])
        data = data.unfold(0, 33, 1)
        x, y = data[:, :32], data[:, 1:]
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters(),
        hvd.Compression.fp16 if asked.half else hvd.Compression.none,
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(asked.steps):
        at = torch.randint(len(x), (samples,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]).flatten(0, -2), y[at].flatten()).backward()
        optimizer.step()


def run(ranks, folder, rate, words, flags=()):
    """Records a job of so many ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
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


def models(rows, only=MODELS, steps=200):
    """Real models on 2, 3 and 4 ranks, from the recording of two."""
    from hvdlite import predict

    with tempfile.TemporaryDirectory() as folder:
        for model in only:
            for batch in (1.0, 2.0):
                words = ["--model", model, "--batch", str(batch), "--steps", str(steps)]
                small = os.path.join(folder, f"{model}-{batch}-2")
                run(2, small, None, words)
                recorded = predict.load(small)
                for ranks, setting in [(2, "plain"), (3, "plain"), (4, "plain"), *[(4, "fp16")] * (batch == 1)]:
                    flags, more, asked = SETTINGS[setting]
                    large = os.path.join(folder, f"{model}-{batch}-{ranks}-{setting}")
                    run(ranks, large, None, words + more, flags)
                    name = f"{model}, batch {batch:g}x, {setting}"
                    tell(rows, None, ranks, name, recorded, recorded.step(ranks, **asked), large)


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
    inside = sum(row["low"] <= row["measured_ms"] <= row["high"] for row in rows)
    width = statistics.mean((row["high"] - row["low"]) / row["predicted_ms"] for row in rows)
    print(f"{inside} of {len(rows)} measured values lie in their range, which is {100 * width:.0f} % wide in the mean")
    print(f"{pairs} pairs of settings differ by more than 5 %: {pairs - wrong} in the predicted order")


def main():
    if sys.argv[1:2] == ["job"]:
        return job(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("shaped", "models"), default="shaped")
    parser.add_argument("--model", action="append", choices=MODELS, help="of `models`: these alone")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    rows = []
    if asked.what == "shaped":
        shaped(rows)
    else:
        models(rows, asked.model or MODELS)
    summary(rows)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
