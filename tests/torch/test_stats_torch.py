"""Steps of torch optimizers are found without a word, and gradients say when a rank arrived."""

import time

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def _train(steps, late=None, optimizers=1):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    made = []
    for i, part in enumerate([model] if optimizers == 1 else model):
        plain = torch.optim.SGD(part.parameters(), lr=0.1)
        made.append(hvd.DistributedOptimizer(plain, named_parameters=part.named_parameters(f"{i}")))
    for _ in range(steps):
        for optimizer in made:
            optimizer.zero_grad()
        if hvd.rank() == late:
            time.sleep(0.02)
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        for optimizer in made:
            optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")  # all ranks meet here: it hides who was late, if it counted


@as_ranks(1, 2)
def test_an_optimizers_steps_are_counted_and_the_late_rank_found():
    for optimizers in (1, 2):
        hvd.shutdown()
        hvd.init()
        _train(6, late=1, optimizers=optimizers)
        found = hvd.stats(everyone=True)
        assert found["steps"] == 6 and found["optimizer_ms"] > 0
        if hvd.size() == 2:
            assert found["lateness"][1]["last_share"] > 0.7 and found["lateness"][1]["p50_ms"] > 10, found["lateness"]
            assert found["buckets"]["mean_tensors"] > 1
