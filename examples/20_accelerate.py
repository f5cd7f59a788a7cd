"""Trains with Hugging Face Accelerate: hvdlite is the backend, and logs the cost of each step.

    hvdlite-run -np 2 python examples/20_accelerate.py
    torchrun --nproc-per-node 2 examples/20_accelerate.py

Two lines belong to hvdlite. The process group is made before the first Accelerator, which uses the existing group.
It needs Accelerate: pip install "hvdlite[trainers]" scikit-learn
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdlite as hvd

EPOCHS, BATCH, SEED = 10, 32, 1


def train(accelerator: Accelerator) -> None:
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target).long())
    parts = random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(SEED))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=0.002), DataLoader(parts[0], BATCH, shuffle=True),
        DataLoader(parts[1], BATCH),
    )  # fmt: skip
    logger = hvd.StepLogger(print if accelerator.is_main_process else None, every=100)
    for _ in range(EPOCHS):
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            logger.step()
    right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in test_loader]
    accelerator.print(f"test accuracy {torch.cat(right).float().mean():.2%}")


if __name__ == "__main__":
    dist.init_process_group("hvdlite")
    set_seed(SEED)
    train(Accelerator(cpu=True))
    dist.destroy_process_group()
