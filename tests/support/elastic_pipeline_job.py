"""An elastic job that trains a pipeline (hvd.elastic.PipelineState), and its replay in one process.

    PIPELINE='{"shapes": {"4": [2, 2]}}' hvdlite-run -np 4 --min-np 1 python elastic_pipeline_job.py FOLDER

It ends at a step of the plan, or soon after FOLDER/last is there. FOLDER/final.pt then has the model and the log of
layouts, from which `replayed` makes the same bits. FOLDER/<pid>.steps: the time, step, rank and size of what each
process did. Plan: shapes by number of ranks; kills {step: ranks}, each once, after a commit; deaths {member: [place,
count, seconds]} in calls of the state; and what else Plan names.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import nn

BATCH, WIDTH = 24, 16


@dataclass
class Plan:
    steps: int = 1 << 30
    commit: int = 2
    copies: int = 2
    shapes: dict = field(default_factory=dict)
    kills: dict = field(default_factory=dict)
    deaths: dict = field(default_factory=dict)
    pause: float = 0.0
    save_to: str = ""
    frozen: bool = False  # two layers learn from step 6 on only, and one never
    tied: bool = False  # the first and the last block share a weight
    late: bool = False  # a parameter is added to a layer at step 5
    memory: str = ""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def frozen(layer):
    return layer.requires_grad_(False)


def layers_of(plan):
    made = [lambda: nn.Linear(8, WIDTH), *[Block] * 6, lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 10))]
    if plan.frozen:
        made[2:5] = [lambda: frozen(Block())] * 3
    return made


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def rows(step):
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 8, generator=made)
    return x, (x.sum(1).abs() * 2).long().clamp(0, 9)


def melt(model, step):
    """A part of the model begins to learn; of a stage, what is there."""
    if step == 6:
        for name, p in model.named_parameters():
            if name.startswith(("2.", "4.")):
                p.requires_grad_(True)


def replayed(plan, log):
    """The parameters, and the states of the optimizer, of one process that has made the same steps."""
    made = []
    for number, make in enumerate(layers_of(plan)):
        torch.manual_seed(1_000_003 + number)
        made.append(make())
    if plan.tied:
        made[6].up.weight = made[1].up.weight
    model = nn.Sequential(*made)
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer)
    for step in range(plan.steps):
        layout = [each for first, each in log if first <= step][-1]
        melt(model, step) if plan.frozen else None
        (x, y), total = rows(step), None
        for xs, ys in zip(x.tensor_split(layout.dp), y.tensor_split(layout.dp)):
            optimizer.zero_grad()
            for cx, cy in zip(xs.tensor_split(layout.micro_batches), ys.tensor_split(layout.micro_batches)):
                (nn.functional.cross_entropy(model(cx), cy) / layout.micro_batches).backward()
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            total = grads if total is None else [t if g is None else t.add_(g) for t, g in zip(total, grads)]
        factor = torch.tensor(1.0 / layout.dp, dtype=torch.float32)  # one factor, rounded once, as in the core
        for p, t in zip(model.parameters(), total):
            p.grad = t if t is None or layout.dp == 1 else t.mul_(factor)
        optimizer.step()
        scheduler.step()
    found = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.update({f"optimizer/{name}/{key}": value for key, value in optimizer.state[p].items()})
    return found


def differing(folder, plan):
    """The names of what differs between the end of a job and its replay, and the log."""
    from hvdlite.plan import Layout

    final = torch.load(folder / "final.pt", weights_only=False)
    plan.steps, log = final["steps"], [(step, Layout(*layout)) for step, layout in final["log"]]
    expected, whole = replayed(plan, log), final["whole"]
    found = {name: value for name, value in whole.items() if "param_groups" not in name}
    same = torch.equal
    if plan.tied:  # a weight's uses in two stages are added in another order than in one process

        def same(a, b):
            return torch.allclose(a, b, rtol=1e-4, atol=1e-6)

    wrong = [name for name in found.keys() | expected.keys() if not same(found[name], expected[name])]
    return sorted(wrong), log


def dying(place, call, planned):
    left = [planned[1]]

    def reached(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            with open(os.path.join(sys.argv[1], f"{os.environ['HVDLITE_MEMBER']}.met"), "w") as met:
                met.write(place)
            threading.Timer(planned[2], os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.05 if planned[2] == 0 else 0)
        return call(*args, **kwargs)

    return reached if planned[0] == place else call


def main(folder, plan):
    import hvdlite.torch as hvd
    from hvdlite import parallel
    from hvdlite.elastic_pipeline import exchange
    from hvdlite.elastic_pipeline import state as states
    from hvdlite.plan import Layer

    torch.set_num_threads(1)
    State = hvd.elastic.PipelineState
    if planned := plan.deaths.get(os.environ.get("HVDLITE_MEMBER")):
        for place, holder, name in (
            ("step", State, "train"), ("commit", State, "save"), ("sync", State, "sync"), ("build", State, "_build"),
            ("build", states.Pipeline, "load_whole"), ("alltoall", exchange.hvd, "alltoall"),
        ):  # fmt: skip
            setattr(holder, name, dying(place, getattr(holder, name), planned))
    hvd.init()
    costs = {n: [Layer(str(i), n + 0.3, 2 * n + 0.3, 1e3, 1e4) for i in range(8)] for n in (2, 4)}
    tied = [("table", ["1.up.weight", "6.up.weight"])] if plan.tied else []
    state = State(
        layers_of(plan), optimizer_of, loss=nn.functional.cross_entropy, batch=BATCH, profile=costs, seed=1,
        copies=plan.copies, shape=lambda size: plan.shapes.get(str(size)), lr_scheduler=scheduler_of, tied=tied,
        memory=plan.memory or None, step=0, killed=[],
    )  # fmt: skip
    if plan.save_to:
        state.save_to(plan.save_to)
    out = open(os.path.join(folder, f"{os.getpid()}.steps"), "a", buffering=1)

    @hvd.elastic.run
    def train(state):
        while state.step < plan.steps:
            if state.step in map(int, plan.kills) and state.step not in state.killed:
                state.killed = [*state.killed, state.step]
                state.commit()
                if hvd.rank() in plan.kills[str(state.step)]:
                    print(time.monotonic(), "killed", file=out)
                    os.kill(os.getpid(), signal.SIGKILL)
            if plan.frozen and state.stage is not None:
                melt(state.stage, state.step)
            if plan.late and state.step == 5 and state.stage is not None and "1" in dict(state.stage.named_children()):
                state.stage.get_submodule("1").more = nn.Parameter(torch.zeros(1))
            state.train(*rows(state.step))
            state.step += 1
            time.sleep(plan.pause)
            print(time.monotonic(), state.step, hvd.rank(), hvd.size(), file=out)
            if state.step % plan.commit == 0:
                last = hvd.broadcast_object(os.path.exists(os.path.join(folder, "last")))
                state.commit()
                if last:
                    break

    train(state)
    whole = parallel.whole_state(state.stage, state.mesh, state.optimizer) if state.pipe is not None else None
    if hvd.rank() == 0:
        log = [(step, tuple(layout)) for step, layout in state.log]
        torch.save({"whole": whole, "log": log, "steps": state.step}, os.path.join(folder, "final.pt"))


if __name__ == "__main__":
    main(sys.argv[1], Plan(**json.loads(os.environ["PIPELINE"])))
