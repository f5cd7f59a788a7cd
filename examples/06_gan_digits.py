"""Trains a GAN, two networks with two optimizers, to draw the digits of scikit-learn.

    hvdlite-run -np 2 python examples/06_gan_digits.py
    hvdlite-run -np 4 python examples/06_gan_digits.py --epochs 400 --hidden 512

Only the optimizers are wrapped. Their parameters may have the same names (`0.weight`, ...). The backward pass of one
network may go through the other, whose gradients zero_grad() discards as usual.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdlite.torch as hvd

PIXELS = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--noise", type=int, default=16, help="numbers that a drawing is made from")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--calm", type=float, default=0.5, help="weight of the penalty on steep judgements (R1)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def network(inside: int, hidden: int, outside: int) -> nn.Sequential:
    layers = [nn.Linear(inside, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(hidden, outside))


def distance(drawn: torch.Tensor, real: torch.Tensor) -> float:
    """How far apart two sets of images are: their mean images and how their pixels vary together; 0 if alike."""
    means = (drawn.mean(0) - real.mean(0)).norm()
    return (means + (torch.cov(drawn.T) - torch.cov(real.T)).norm()).item()


def picture(image: torch.Tensor) -> "list[str]":
    return ["".join(" .:*#@"[int(5 * value)] * 2 for value in row) for row in image.clamp(0, 1).view(PIXELS, PIXELS)]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    sampler = DistributedSampler(TensorDataset(images), num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(TensorDataset(images), args.batch_size, sampler=sampler, drop_last=True)

    draws = network(args.noise, args.hidden, PIXELS * PIXELS)
    judges = network(PIXELS * PIXELS, args.hidden, 1)
    hvd.broadcast_state([draws, judges])
    artist = torch.optim.Adam(draws.parameters(), lr=args.lr, betas=(0.5, 0.999))
    critic = torch.optim.Adam(judges.parameters(), lr=args.lr, betas=(0.5, 0.999))
    artist = hvd.DistributedOptimizer(artist, named_parameters=draws.named_parameters())
    critic = hvd.DistributedOptimizer(critic, named_parameters=judges.named_parameters())

    torch.manual_seed(args.seed + 1 + hvd.rank())  # every rank has its own noise
    tell_apart = F.binary_cross_entropy_with_logits
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2)
        for (real,) in loader:
            yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            drawn = torch.sigmoid(draws(torch.randn(len(real), args.noise)))

            critic.zero_grad()
            real.requires_grad_()
            verdict = judges(real)
            (slope,) = torch.autograd.grad(verdict.sum(), real, create_graph=True)
            judged = tell_apart(verdict, yes) + tell_apart(judges(drawn.detach()), no)
            judged = judged + args.calm * slope.square().sum(1).mean()
            judged.backward()
            critic.step()

            artist.zero_grad()
            fooled = tell_apart(judges(drawn), yes)
            fooled.backward()  # also goes through the critic's network
            artist.step()
            losses += torch.stack([judged.detach(), fooled.detach()]) / len(loader)
        losses = hvd.allreduce(losses, name="losses")
        if hvd.rank() == 0 and (epoch % 5 == 4 or epoch in (0, args.epochs - 1)):
            with torch.no_grad():
                drawn = torch.sigmoid(draws(torch.randn(1000, args.noise)))
            line = f"epoch {epoch + 1:3}  critic {losses[0]:.3f}  artist {losses[1]:.3f}"
            print(f"{line}  distance {distance(drawn, images):.3f}")
    hvd.check_consistency(draws)
    hvd.check_consistency(judges)
    if hvd.rank() == 0:
        print("\n".join("   ".join(rows) for rows in zip(*map(picture, drawn[:6]))))


if __name__ == "__main__":
    hvd.init()
    train(arguments())
