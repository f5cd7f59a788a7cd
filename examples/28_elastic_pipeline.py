"""Trains a residual network as a pipeline whose stages and copies follow the number of ranks.

    python examples/28_elastic_pipeline.py                                    # one rank, one stage
    hvdlite-run -np 2 python examples/28_elastic_pipeline.py --memory 2MB     # two stages: one has no room
    hvdlite-run -np 4 --min-np 1 python examples/28_elastic_pipeline.py --steps 3000    # then kill -9 PROCESS
    hvdlite-run -np 4 --min-np 2 python examples/28_elastic_pipeline.py --memory 2MB --save-to run7

If a rank is killed, the others choose stages and copies anew and continue from the last commit, which they have in
memory. Each rank prints its process number. With a folder, a job that is started again continues from its last commit,
on any number of ranks. The data are the 1797 digits of scikit-learn (8 x 8 pixels).
"""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import hvdlite.torch as hvd
from hvdlite import plan

BATCH, WIDTH = 96, 96  # rows of a step, of all copies together: they never change


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a pipeline on handwritten digits while ranks come and go.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory", help="memory of a rank, as 2MB: less means more stages; default: no limit")
    parser.add_argument("--save-to", metavar="FOLDER", help="a folder that keeps the layers of the last commit")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def main() -> None:
    args = arguments()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    rows, held_out = map(torch.tensor, train_test_split(range(len(labels)), test_size=0.2, random_state=1))
    layers = [lambda: nn.Linear(64, WIDTH), *[Block] * 6, lambda: nn.Linear(WIDTH, 10)]  # a stage begins at any of them
    costs = plan.profiles(layers, images[:BATCH], rows=(8, 16, 32))  # ms and bytes of micro-batches of so many rows
    hvd.init()
    state = hvd.elastic.PipelineState(
        layers, lambda parameters: torch.optim.AdamW(parameters, lr=2e-3), loss=F.cross_entropy,
        batch=BATCH, profile=costs, memory=args.memory, step=0,
    )  # fmt: skip
    if args.save_to:
        state.save_to(args.save_to)

    @hvd.elastic.run  # called again with the last commit, on the ranks that are there
    def train(state: hvd.elastic.PipelineState) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
        while state.step < args.steps:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(state.step))

            def some(first: int, last: int, order: torch.Tensor = order) -> "tuple[torch.Tensor, torch.Tensor]":
                """The rows of one copy. They depend on the step alone, so each rank finds them by itself."""
                picked = rows[order[first:last]]
                return images[picked], labels[picked]

            loss = state.train(some)  # on the ranks of the last stage, else None
            state.step += 1
            if state.step % 50 == 0 and loss is not None and state.mesh.coordinate("dp") == 0:
                print(f"step {state.step:4}  {hvd.size()} ranks  loss {loss:.4f}", flush=True)
            if state.step % 10 == 0:
                state.commit()
        if state.pipe is not None:  # None on a spare rank
            output = state.pipe.predict(images[held_out])  # on the ranks of the last stage, else None
            if output is not None and state.mesh.coordinate("dp") == 0:
                right = (output.argmax(1) == labels[held_out]).float().mean().item()
                print(f"{state.layout.describe()}: test accuracy {right:.2%}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
