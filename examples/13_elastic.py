"""Trains on handwritten digits while ranks come and go: if one is killed, the others continue from the last commit.

    hvdlite-run -np 3 --min-np 1 python examples/13_elastic.py
    hvdlite-run -np 3 --min-np 1 --blacklist-cooldown-range 0 0 python examples/13_elastic.py --epochs 60 --lose 2
    hvdlite-run -np 3 --min-np 1 python examples/13_elastic.py --saved digits.state

In the second form rank 2 kills itself and the others continue. A new process takes its place as soon as it is ready.
Without the flag the host gets no new process for 5 seconds. In the third form the state is also kept in a file. A job
that Ctrl-C or the time limit of a cluster ended resumes from its last commit when it is started again. Lines that
differ from 03_train_digits.py are marked `elastic`.
"""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits while ranks come and go.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="over all ranks together")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--saved", help="a file that keeps the state of the last commit")
    parser.add_argument("--lose", type=int, default=-1, metavar="RANK", help="this rank kills itself, once")
    return parser.parse_args()


def load() -> "tuple[TensorDataset, TensorDataset]":
    """Training and test set: images (n, 64) of float32 in 0..1 and labels (n,) of int64."""
    digits = load_digits()
    split = train_test_split(digits.data, digits.target, test_size=0.2, stratify=digits.target, random_state=1)
    images, labels = split[:2], split[2:]
    train, test = (
        TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y).long()) for x, y in zip(images, labels)
    )
    return train, test


def main() -> None:
    args = arguments()
    hvd.init()  # elastic: a process that joins later does not wait here
    torch.manual_seed(1)
    train_set, test_set = load()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(train_set)  # elastic: divides the rest of the epoch among the current ranks
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, lost=False)
    if args.saved:
        state.save_to(args.saved)  # elastic: a restarted job resumes from this file

    @hvd.elastic.run  # elastic: the remaining ranks call it again, with the last commit
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            batch_size = max(1, args.batch_size // hvd.size())  # elastic: the global batch stays
            loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
            for number, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(number, batch_size)  # elastic
                state.batch += 1
                if state.batch % 5 == 0:
                    state.commit()  # elastic: after a failure, work since the last commit is repeated
                if args.lose >= 0 and state.batch == 62 and not state.lost:
                    state.lost = True
                    state.commit()  # so the kill is not repeated
                    if hvd.rank() == args.lose:
                        os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            with torch.no_grad():
                right = (model(test_set.tensors[0]).argmax(1) == test_set.tensors[1]).float().mean().item()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch:2}  {hvd.size()} ranks  test accuracy {right:.2%}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
