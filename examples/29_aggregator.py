"""Trains digits with gradients that an aggregator adds, a process that stands in for a network switch.

    hvdlite-run -np 2 --aggregators 1 python examples/29_aggregator.py
    hvdlite-run -np 2 --aggregators 1 --aggregator-kind hashed python examples/29_aggregator.py

All gradients travel as one vector. Kill the aggregator, and the training ends with the same weights: the ranks then add
the same integers themselves. Rank 0 prints a digest of the weights and what the aggregator has done for it. The data
are the 1797 digits of scikit-learn (8 x 8 pixels).
"""

import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hvdlite.torch as hvd  # hvdlite

BATCH, STEPS, HELD_OUT = 96, 150, 360  # rows of all ranks together


def average_gradients(model: nn.Module) -> None:
    """In place. A parameter has a gradient on all ranks or on none."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    whole = hvd.aggregation.allreduce(parameters_to_vector(gradients), op=hvd.Average, name="gradients")  # hvdlite
    vector_to_parameters(torch.from_numpy(whole), gradients)


def main() -> None:
    hvd.init()  # hvdlite
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    hvd.broadcast_state(model, optimizer)  # hvdlite: all start from the same weights
    order = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows = HELD_OUT + torch.randperm(len(labels) - HELD_OUT, generator=order)[:BATCH]
        mine = rows[hvd.rank() :: hvd.size()]  # hvdlite
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        if step == 0:
            names = [name for name, each in model.named_parameters() if each.grad is not None]
            if any(each != names for each in hvd.allgather_object(names)):  # hvdlite
                raise SystemExit("29_aggregator: the ranks have gradients of different parameters")
        average_gradients(model)
        optimizer.step()
    right = (model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).float().mean().item()
    if hvd.rank() == 0:
        weights = parameters_to_vector(model.parameters()).detach().numpy()
        print(f"test accuracy {right:.2%}, weights {hashlib.sha256(weights.tobytes()).hexdigest()[:12]}", flush=True)
        print(hvd.aggregation.stats(), flush=True)


if __name__ == "__main__":
    main()
