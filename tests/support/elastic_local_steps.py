"""Program of an elastic job with DiLoCo. At each start a rank that has trained before looks whether it still has what
it had, but for fragments whose exchange it has missed; a newcomer looks whether it begins with the global weights.
"""

import os
import sys
import time

import torch

import hvdlite.torch as hvd

folder, every, fragments, delay = sys.argv[1], 8, 2, int(os.environ["DELAY"])
mine = []  # copies of this process's weights, and its steps so far
made = 0


def copies(model):
    return [each.detach().clone() for each in model.parameters()]


def compare(state):
    part = zip(state.diloco._fragments, (slice(0, 2), slice(2, 4)))
    ours = list(state.model.parameters())
    for fragment, members in part:
        theirs = list(fragment.globals)
        took = all(torch.equal(one, other) for one, other in zip(ours[members], theirs))
        kept = mine and all(torch.equal(one, other) for one, other in zip(ours[members], mine[members]))
        assert kept or took, f"rank {hvd.rank()} lost its local steps at {state.step}"
    if mine:
        moments = next(iter(state.optimizer.state.values()))["step"]
        assert moments == made, f"the inner optimizer went back from {made} steps to {moments}"


@hvd.elastic.run
def train(state):
    global mine, made
    compare(state)
    made = int(next((each["step"] for each in state.optimizer.state.values()), 0))
    with open(f"{folder}/{os.getpid()}.steps", "a") as steps:
        while not state.last:
            rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
            state.optimizer.zero_grad()
            state.model(rows).pow(2).mean().backward()
            try:
                state.optimizer.step()
            finally:
                mine, made = copies(state.model), made + 1
            state.step += 1
            print(time.monotonic(), state.step, hvd.rank(), hvd.size(), file=steps, flush=True)
            time.sleep(0.01)
            if state.step % 6 == 0:
                state.last = hvd.broadcast_object(os.path.exists(f"{folder}/last"))
                state.commit()
    state.diloco.finish()
    hvd.check_consistency(state.model)


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
diloco = hvd.DiLoCo(model, optimizer, every, fragments=fragments, delay=delay)
train(hvd.elastic.TorchState(model, optimizer, diloco=diloco, step=0, last=False))
print(f"rank {hvd.rank()} ended well after {made} steps", flush=True)
