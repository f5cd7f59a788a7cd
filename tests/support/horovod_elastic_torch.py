"""Elastic training on PyTorch as Horovod's users write it: nothing here knows of hvdlite.

Run by test_elastic_frameworks.py, which kills a rank and makes the file that is named last once another has come.
"""

import json
import os
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.optim as optim

hvd.init()
torch.manual_seed(1 + hvd.rank())
inputs = torch.randn(96, 3, generator=torch.Generator().manual_seed(5))
dataset = torch.utils.data.TensorDataset(torch.arange(96), inputs, inputs.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(3, 1)
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    shown = False
    while not hvd.broadcast_object(os.path.exists(sys.argv[1])):
        for idx, (number, data, target) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(data), target).backward()
            optimizer.step()
            state.sampler.record_batch(idx, 4)
            state.seen = state.seen + sum(hvd.allgather_object(number.tolist()), [])
            if not shown:
                print(f"trains: rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}.", flush=True)
                shown = True
            if idx % 3 == 2:
                state.commit()
        counts = [state.seen.count(each) for each in range(96)]
        state.once = state.once and min(counts) == 1 and sum(counts) <= 96 + 3 * 12  # but for the padding
        state.epoch, state.seen = state.epoch + 1, []
        state.sampler.set_epoch(state.epoch)
        state.commit()


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[], once=True)
state.register_reset_callbacks([on_state_reset])
train(state)
loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).item()
weights, lr = model.weight.detach().ravel().tolist(), optimizer.param_groups[0]["lr"]
with open(f"{sys.argv[1]}.{hvd.rank()}", "w") as file:
    json.dump({"weights": weights, "loss": loss, "lr": lr, "once": state.once}, file)
