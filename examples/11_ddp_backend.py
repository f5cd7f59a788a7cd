"""Trains with PyTorch's own DistributedDataParallel, with hvdlite as the backend.

    hvdlite-run -np 2 python examples/11_ddp_backend.py
    hvdlite-run -np 2 python examples/11_ddp_backend.py gloo      # the same program, the same weights, over Gloo
    torchrun --nproc-per-node 2 examples/11_ddp_backend.py        # started by torchrun

The name of the backend is the only change. Both backends add the gradients of two ranks in the same order, so both
print the same loss to the last digit.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SEED = 12, 64, 1  # a batch over all ranks together


def load() -> "tuple[TensorDataset, TensorDataset]":
    """Training and test set: images (n, 64) in 0..1 and labels (n,)."""
    digits = load_digits()
    split = train_test_split(digits.data / 16, digits.target, test_size=0.2, random_state=SEED)
    images, test_images = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    labels, test_labels = (torch.tensor(part).long() for part in split[2:])
    return TensorDataset(images, labels), TensorDataset(test_images, test_labels)


def train() -> None:
    torch.manual_seed(SEED)
    train_set, test_set = load()
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    sampler = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=max(1, BATCH // dist.get_world_size()), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() / (len(loader) * dist.get_world_size())
        images, labels = (each[dist.get_rank() :: dist.get_world_size()] for each in test_set.tensors)
        right = (net(images).argmax(1) == labels).sum()
        dist.all_reduce(total)
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}  loss {total:.7f}  test accuracy {right / len(test_set):.2%}")


if __name__ == "__main__":
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "hvdlite")
    train()
    dist.destroy_process_group()
