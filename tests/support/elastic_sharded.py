"""Program of an elastic job with a sharded optimizer. At each start, and at its end, it compares what a rank has of
values and state with one process that has made the same steps. A death leaves no mixture of two commits, or it ends
with an error. Gradients are small integers, so that their averages are exact for any number of ranks.
"""

import os
import sys
import time

import torch

import hvdlite.torch as hvd

folder, name = sys.argv[1], os.environ["OPTIMIZER"]
MAKE = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 290), torch.nn.Linear(290, 7), torch.nn.Linear(7, 3))


def set_gradients(parameters, step):
    """By a backward pass whose gradients are integers."""
    sum((each.view(-1)[step % 5 :: 3] * (1.0 + step % 3)).sum() for each in parameters).backward()


class Alone:
    """The training that no death has changed."""

    def __init__(self):
        self.model, self.step = model(), 0
        self.optimizer = MAKE[name](self.model.parameters(), lr=1e-2)

    def go(self, step):
        while self.step < step:
            self.optimizer.zero_grad()
            set_gradients(self.optimizer.param_groups[0]["params"], self.step)
            self.optimizer.step()
            self.step += 1


alone = Alone()


def compare(state):
    if state.step < alone.step:
        alone.__init__()
    alone.go(state.step)
    shards, ours = state.optimizer._hvd_shards, list(alone.model.parameters())
    apart = [
        (number, float((one - other).abs().max()))
        for number, (one, other) in enumerate(zip(state.model.parameters(), ours))
    ]
    assert not any(most for _, most in apart), f"values differ at step {state.step}: {apart}"
    assert state.step == 0 or any(shards.inner.state.values())
    for (_, piece), made in shards.pieces.items():
        for key, value in shards.inner.state.get(made, {}).items():
            whole = alone.optimizer.state[ours[piece.number]][key]
            mine = whole.view(-1)[piece.begin : piece.end] if shards.is_cut(key, value, made.shape) else whole
            assert torch.equal(value, mine), f"{key} differs at step {state.step}"


@hvd.elastic.run
def train(state):
    compare(state)
    with open(f"{folder}/{os.getpid()}.steps", "a") as steps:
        while not state.last:
            optimizer = state.optimizer
            optimizer.zero_grad()
            set_gradients(optimizer.param_groups[0]["params"], state.step)
            optimizer.step()
            state.step += 1
            print(time.monotonic(), state.step, hvd.rank(), hvd.size(), file=steps, flush=True)
            time.sleep(0.02)  # a newcomer repeats all steps
            if state.step % 4 == 0:
                state.last = hvd.broadcast_object(os.path.exists(f"{folder}/last"))
                state.commit()
    compare(state)


hvd.init()
torch.set_num_threads(1)
net = model()
wrapped = hvd.DistributedOptimizer(MAKE[name](net.parameters(), lr=1e-2), net.named_parameters(), shard=True)
train(hvd.elastic.TorchState(net, wrapped, step=0, last=False))
print("ended well", flush=True)
