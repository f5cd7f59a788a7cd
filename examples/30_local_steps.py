"""Trains a network on islands of ranks that average in each step, and among islands every few steps only.

    hvdlite-run -np 4 python examples/30_local_steps.py                                   # two islands of two ranks
    hvdlite-run -np 4 python examples/30_local_steps.py --fragments 4 --delay 3           # streaming: no waiting
    hvdlite-run -np 2 --min-np 1 python examples/30_local_steps.py --elastic --epochs 60  # then kill -9 PROCESS
    hvdlite-run -H office1:2,office2:2 python examples/30_local_steps.py --bits 4         # in 4 bits between hosts

An island is a place with a fast network, such as a host. Inside it `DistributedOptimizer` averages gradients. Among
islands `DiLoCo` averages what each island has changed in `--sync-every` steps: 20 times fewer bytes by default. In an
elastic job each rank is an island. If one is killed, the others keep their steps. The data are the 1797 digits of
scikit-learn (8 x 8 pixels).
"""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on islands of ranks.")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--sync-every", type=int, default=20, help="steps of an island's own")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model that are exchanged in turn")
    parser.add_argument("--delay", type=int, default=0, help="steps that an exchange may take while the loop goes on")
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=32, help="of a number between hosts")
    parser.add_argument("--elastic", action="store_true", help="ranks may be lost and added")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    train_images, train_labels = images[~held_out], labels[~held_out]
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if not args.elastic:  # the process sets of an elastic job would end with a rank
        mesh = hvd.Mesh(island=args.islands, place=-1)
        inside = mesh.group("place")
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=inside)
    bits = {4: hvd.Compression.int4, 8: hvd.Compression.int8, 32: hvd.Compression.none}[args.bits]
    trainer = hvd.DiLoCo(
        model, optimizer, args.sync_every, fragments=args.fragments, delay=args.delay, compression=bits
    )  # all ranks: between hosts, the ranks of a host send once
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = hvd.elastic.TorchState(model, optimizer, trainer=trainer, epoch=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
        while state.epoch < args.epochs:
            order = torch.randperm(len(train_labels), generator=torch.Generator().manual_seed(state.epoch))
            mine = order[hvd.rank() :: hvd.size()]
            for rows in mine.split(args.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(model(train_images[rows]), train_labels[rows]).backward()
                optimizer.step()
            state.epoch += 1
            state.commit()
        trainer.finish()

    train(state)
    model.eval()
    right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
    if hvd.rank() == 0:
        print(f"test accuracy {right:.2%} on {hvd.size()} ranks, {trainer.wait_seconds:.2f} s of waiting")


if __name__ == "__main__":
    main()
