"""Program of an elastic job whose gradients are compressed: after each commit all ranks have the same weights.

Its ranks take each other for ranks of other hosts, so that there is something to compress.
"""

import os
import sys
import time

import torch

import hvdlite.torch as hvd
from hvdlite.process_sets import levels

levels.hosts_in = lambda process_set: process_set.size()

folder, name = sys.argv[1], os.environ["COMPRESSION"]
POWER = hvd.PowerSGD(2, start_after=2, least_gain=1.0)
MAKE = {"int8": hvd.Compression.int8(least_bytes=0), "accordion": hvd.Accordion(POWER, hvd.PowerSGD(1), every=2)}

hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))
plain = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=MAKE[name])


@hvd.elastic.run
def train(state):
    while state.step < 40:
        chance = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=chance)).square().mean().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        if state.step == 12 and hvd.rank() == 1 and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            os.kill(os.getpid(), 9)
        if state.step % 5 == 0:
            state.commit()
            mine = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
            assert all(torch.equal(each, mine) for each in hvd.allgather_object(mine, "weights"))
    assert optimizer._hvd.carrier.layout and not any(wrong_residuals())
    print("ended well", flush=True)


def wrong_residuals():
    """Residuals that are not finite, as those of gradients in another unit could be."""
    kept = optimizer.state_dict()["hvdlite"]["residuals"].values()
    return [not each.isfinite().all() for each in kept]


train(hvd.elastic.TorchState(model, optimizer, step=0))
