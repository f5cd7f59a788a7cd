"""Trains a ResNet with the recipe of ImageNet, writes checkpoints, and resumes from them.

    hvdlite-run -np 2 python examples/04_train_resnet.py                                 # small, a minute
    hvdlite-run -np 2 python examples/04_train_resnet.py --checkpoint resnet.pt          # run it again to resume
    hvdlite-run -np 8 python examples/04_train_resnet.py --depth 50 --width 64 --image-size 224 --classes 1000 \\
        --samples 1281167 --batch-size 32 --epochs 90                                    # real sizes

The images are synthetic, so nothing is downloaded: each class has a pattern, with noise on top. The rest is as in a
real program. The learning rate grows with the number of ranks and warms up. Metrics are averaged over ranks. Rank 0
alone writes the checkpoint, in one step, so a job killed at any moment leaves a complete file. On the same number of
ranks, a resumed job ends with the same bits as an uninterrupted one.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import hvdlite.torch as hvd

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ResNet on synthetic images.")
    parser.add_argument("--depth", type=int, default=10, choices=sorted(BLOCKS))
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage; 64 in the original")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1024, help="in the training set; an eighth more to test on")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, help="end after this epoch, as if the job had been stopped")
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--lr", type=float, default=0.1, help="per 256 images of a step")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch; resumed from if it exists")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, per rank")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Patterns(Dataset):
    """(image, label): image (3, size, size) float32 of its class's pattern under noise that is the sample's own."""

    def __init__(self, count: int, classes: int, size: int, seed: int) -> None:
        self.count, self.seed = count, seed
        coarse = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> "tuple[torch.Tensor, int]":
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % len(self.patterns)
        return self.patterns[label] + torch.randn(self.patterns[0].shape, generator=generator), label


class Block(nn.Module):
    """Two 3 x 3 convolutions, or from depth 50 on a bottleneck of 1 x 1, 3 x 3, 1 x 1; and the way around them."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        after = width * (4 if bottleneck else 1)
        sizes = [(before, width, 1), (width, width, 3), (width, after, 1)]
        if not bottleneck:
            sizes = [(before, width, 3), (width, width, 3)]
        layers: list[nn.Module] = []
        strided = len(sizes) - 2  # the 3 x 3 convolution that makes the image smaller
        for i, (inside, outside, kernel) in enumerate(sizes):
            step = stride if i == strided else 1
            layers += [nn.Conv2d(inside, outside, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(outside)]
            layers += [nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        nn.init.zeros_(self.layers[-1].weight)  # a new block changes nothing: large batches train better
        self.around = nn.Sequential()
        if stride != 1 or before != after:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.around(x))


def resnet(depth: int, width: int, classes: int) -> nn.Sequential:
    """Images (n, 3, size, size) of size >= 32 to scores (n, classes)."""
    bottleneck = depth >= 50
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(BLOCKS[depth]):
        for i in range(count):
            layers += [Block(channels, width << stage, 2 if stage and i == 0 else 1, bottleneck)]
            channels = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resume(path: "Path | None", model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give every rank the checkpoint's state, or rank 0's fresh one; returns the number of epochs done."""
    done = 0
    if hvd.rank() == 0 and path and path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
        print(f"resumed from {path} after epoch {done}")
    return hvd.broadcast_state(model, optimizer, extra=done)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write the checkpoint beside its place, then put it there in one step."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def average_statistics(model: nn.Module) -> None:
    """Each rank's batch normalisation has seen its own shard: from here on all have the mean of what they saw."""
    seen = [buffer for name, buffer in model.named_buffers() if "running" in name]
    hvd.grouped_allreduce_(seen, name="statistics")


def test(model: nn.Module, images: Dataset, batch: int) -> "tuple[float, float]":
    """Mean loss and share of right answers over the whole set, of which each rank looks at its part."""
    mine = Subset(images, range(hvd.rank(), len(images), hvd.size()))
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in DataLoader(mine, batch):
            scores = model(x)
            sums += torch.stack([F.cross_entropy(scores, y, reduction="sum"), (scores.argmax(1) == y).sum()])
    model.train()
    loss, right = (hvd.allreduce(sums, op=hvd.Sum, name="test") / len(images)).tolist()
    return loss, right


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    held_out = max(1, args.samples // 8)
    whole = Patterns(args.samples + held_out, args.classes, args.image_size, args.seed)
    train_set, test_set = Subset(whole, range(args.samples)), Subset(whole, range(args.samples, len(whole)))
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers)

    model = resnet(args.depth, args.width, args.classes)
    full_rate = args.lr * args.batch_size * hvd.size() / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=full_rate, momentum=0.9, weight_decay=5e-5)
    done = resume(args.checkpoint, model, optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    warmup, total = args.warmup_epochs * len(loader), args.epochs * len(loader)
    for epoch in range(done, args.epochs if args.stop_after is None else min(args.epochs, args.stop_after)):
        sampler.set_epoch(epoch)
        train_loss = 0.0
        for i, (images, labels) in enumerate(loader):
            step = epoch * len(loader) + i
            rate = min((step + 1) / max(warmup, 1), 0.5 + 0.5 * math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = full_rate * rate
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            train_loss += loss.item() / len(loader)
        average_statistics(model)
        train_loss = hvd.allreduce(torch.tensor(train_loss), name="loss").item()
        test_loss, right = test(model, test_set, args.batch_size)
        if hvd.rank() == 0:
            if args.checkpoint:
                save(args.checkpoint, model, optimizer, epoch + 1)
            print(f"epoch {epoch + 1:2}  loss {train_loss:.4f}  test loss {test_loss:.4f}  test accuracy {right:.2%}")


if __name__ == "__main__":
    hvd.init()
    train(arguments())
