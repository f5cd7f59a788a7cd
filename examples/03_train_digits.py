"""Trains a small convolutional network on real handwritten digits, on as many ranks as you start.

    hvdlite-run -np 2 python examples/03_train_digits.py
    python examples/03_train_digits.py                             # the same program on one rank
    hvdlite-run -np 2 python examples/03_train_digits.py --data DIR   # MNIST or Fashion-MNIST: four IDX files in DIR

By default it learns the 1797 digits of scikit-learn (8 x 8 pixels) and reaches more than 97 % test accuracy. A program
for one process lacks only the lines marked `hvdlite`.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import hvdlite.torch as hvd  # hvdlite
from idx import IdxError, read_pair


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument(
        "--data", type=Path, help="folder with the four IDX files of MNIST or Fashion-MNIST, .gz or not"
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="over all ranks together")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(args: argparse.Namespace) -> "tuple[TensorDataset, TensorDataset]":
    """Training and test set: images (n, 1, height, width) of float32 in 0..1 and labels (n,) of int64."""
    if args.data:
        parts = [read_pair(args.data, "train"), read_pair(args.data, "test")]
        brightest = 255
    else:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        split = train_test_split(
            digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=args.seed
        )
        parts = [(split[0], split[2]), (split[1], split[3])]
        brightest = 16
    train, test = (
        TensorDataset(torch.tensor(images, dtype=torch.float32).unsqueeze(1) / brightest, torch.tensor(labels).long())
        for images, labels in parts
    )
    return train, test


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of any size from 4 x 4."""

    def __init__(self, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        )
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), 128), nn.ReLU(), nn.Linear(128, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images))


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Share of the whole test set that is classified right; each rank looks at its part."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(1000), labels.split(1000)))
    model.train()
    right = hvd.allreduce(torch.as_tensor(right), op=hvd.Sum, name="right")  # hvdlite
    return right.item() / len(test)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    train_set, test_set = load(args)
    _, height, width = train_set.tensors[0].shape[1:]
    classes = int(train_set.tensors[1].max()) + 1
    model = Net(height, width, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvdlite: all start from the same weights
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvdlite
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvdlite

    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)  # hvdlite
    loader = DataLoader(train_set, batch_size=max(1, args.batch_size // hvd.size()), sampler=sampler)
    progress = tqdm(total=args.epochs * len(loader), unit="step", disable=hvd.rank() != 0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        started, total = time.perf_counter(), 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
            progress.update()
        rate = len(train_set) / (time.perf_counter() - started)
        mean = hvd.allreduce(torch.tensor(total / len(loader)), name="loss").item()  # hvdlite: over all ranks
        share = accuracy(model, test_set)
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}  loss {mean:.4f}  test accuracy {share:.2%}  {rate:,.0f} samples/s"
            progress.write(line)
    progress.close()


if __name__ == "__main__":
    hvd.init()  # hvdlite
    try:
        train(arguments())
    except IdxError as error:
        raise SystemExit(f"03_train_digits: {error}") from None
