"""Does a pipeline that was saved and loaded go on as if it had not stopped, in bits?

By parts and as a whole, through a file, with what only a resume shows: rates of schedulers, groups, numbers of update
policies, scales, dropout, state that is no tensor. What cannot be saved or loaded is refused with its name.
"""

import io
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from ranks import as_ranks
from small_pipelines import Mlp, rows
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel.checkpoint_values import alike
from hvdlite.parallel.weights import Stash

LR, OPT = torch.optim.lr_scheduler, torch.optim


class Counting(nn.Module):
    """A layer and an optimizer that keep Python's numbers."""

    def __init__(self):
        super().__init__()
        self.line, self.calls = nn.Linear(12, 12), 0

    def forward(self, x):
        self.calls += self.training
        return self.line(x) / (1 + self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Slowing(OPT.SGD):
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.data.sub_(p.grad, alpha=0.1 / count)


class Sum(Stash):
    def __init__(self, module, place):
        super().__init__(module, place)
        self.total = dict.fromkeys(self.params, 0)

    def update(self, step):
        self.total = {name: total + 1 for name, total in self.total.items()}
        super().update(lambda _: step(1.0 / max(self.total.values())))


class Kept(Sum):
    def state(self):
        return {**super().state(), "total": self.total}

    def load(self, state):
        super().load(state)
        self.total = state["total"]


def sgd(params):
    return OPT.SGD(params, lr=0.1, momentum=0.9)


def groups(params):
    """Other rates and decays for biases, and another group for one that is on one stage only."""
    mine = {"weight": [], "bias": [], "last": []}
    for p in params:
        mine["weight" if p.dim() > 1 else "last" if hasattr(p, "last") else "bias"].append(p)
    settings = {"weight": {"weight_decay": 0.1}, "bias": {"lr": 0.02, "weight_decay": 0.0}, "last": {"lr": 0.03}}
    return OPT.AdamW([{"params": mine[name], **settings[name]} for name in mine if mine[name]], lr=0.01, foreach=False)


def made(make=sgd, rate=None, layer=Mlp, shape=(("pp", 2),), loss=F.cross_entropy, scale=None, **rest):
    torch.manual_seed(3)
    mesh = hvd.Mesh(**dict(shape))
    layers = [Mlp(), layer(), nn.Tanh() if layer is nn.Tanh else Mlp()]
    if layer is Mlp:
        layers[2].line.bias.last = True
    stage = parallel.split(layers, mesh, [1, 2] if mesh.shape["pp"] == 2 else [3])
    params = list(stage.parameters())
    optimizer = make(params) if params else None
    scheduler = rate(optimizer) if rate and optimizer else None
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=scale) if scale else None
    return parallel.Pipeline(stage, optimizer, mesh, loss, 2, lr_scheduler=scheduler, scaler=scaler, timeout=20, **rest)


def steps(pipe, batches):
    for x, y in batches:
        pipe.step(x, y)
    pipe.drain()
    return pipe


def filed(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def without(state, *starts):
    return {name: value for name, value in state.items() if not name.startswith(starts)}


RATES = {
    "StepLR": lambda o: LR.StepLR(o, 2, 0.1),
    "MultiStepLR": lambda o: LR.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: LR.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: LR.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: LR.OneCycleLR(o, 0.2, total_steps=8),
    "LambdaLR": lambda o: LR.LambdaLR(o, lambda n: 0.8**n),
    "SequentialLR": lambda o: LR.SequentialLR(o, [LR.ConstantLR(o, 0.5), LR.ExponentialLR(o, 0.7)], [4]),
}
OPTIMIZERS = {
    "amsgrad": lambda p: OPT.AdamW(p, amsgrad=True),
    "centered": lambda p: OPT.RMSprop(p, centered=True, momentum=0.5),
    "tensor lr": lambda p: OPT.Adam(p, lr=torch.tensor(0.01), foreach=False),
    **{name: lambda p, name=name: getattr(OPT, name)(p) for name in ("Adagrad", "NAdam", "ASGD", "Adafactor", "Rprop")},
    "numbers": Slowing,
    "groups": groups,
    "SGD": lambda p: OPT.SGD(p, lr=0.1),
}
UPDATES = {
    "pipemare": {"anneal": 6, "rate": RATES["StepLR"]}, "stash": {}, "vertical": {}, "2bw": {}
}  # fmt: skip
SETTINGS = {
    **{name: {"rate": rate} for name, rate in RATES.items()},
    **{name: {"make": make} for name, make in OPTIMIZERS.items()},
    **{name: {"update": name, "schedule": "continuous", **more} for name, more in UPDATES.items()},
    "a user's update": {"update": Kept, "schedule": "continuous"},
    "weights only": {"make": lambda params: sgd(params[::2])},
    "scaler": {"scale": 2},
    "dropout": {"layer": lambda: Mlp(0.5)},
    "extra state": {"layer": Counting},
    "no parameters": {"layer": nn.Tanh, "rate": RATES["StepLR"]},
}


@as_ranks(2)
def test_a_resumed_run_equals_the_one_that_went_on():
    for name, settings in SETTINGS.items():
        went_on = steps(made(**settings), rows(7)[:3])
        part = filed(went_on.state_dict())
        whole = filed(hvd.broadcast_object(went_on.whole_state(1), 1))
        wanted = filed(steps(went_on, rows(7)[3:]).state_dict())
        back = ("load_whole", whole, went_on)  # as after a loss that is not finite
        for load, saved, other in (("load_state_dict", part, None), ("load_whole", whole, None), back):
            other = other or made(**settings)
            torch.manual_seed(99)
            getattr(other, load)(saved)
            assert alike(other.state_dict(), part), (name, load)
            found = steps(other, rows(7)[3:]).state_dict()
            assert alike(found, wanted) and not alike(found, part), (name, load)


@as_ranks(2)
@pytest.mark.parametrize("rate", ["StepLR", "LambdaLR", "SequentialLR"])
def test_the_whole_goes_on_in_another_layout_and_back(rate):
    """Two copies of one stage have the same batches, so that their mean is what one process has."""
    settings, shapes = {"make": groups, "rate": RATES[rate], "scale": 2}, ((("pp", 2),), (("dp", 2), ("pp", 1)))
    wanted = steps(made(**settings), rows(6))
    pipe = steps(made(**settings), rows(6)[:2])
    for shape, batches in ((shapes[1], rows(6)[2:4]), (shapes[0], rows(6)[4:])):
        whole = filed(hvd.broadcast_object(pipe.whole_state()))
        pipe = made(**settings, shape=shape)
        with pytest.warns(UserWarning, match=r"random numbers of the mesh .*HVD018"):
            pipe.load_whole(whole)
        again = hvd.broadcast_object(pipe.whole_state())
        assert alike(*(without(each, "pipeline/random") for each in (again, whole)))
        steps(pipe, batches)
    assert alike(*(without(each.state_dict(), "pipeline/random") for each in (pipe, wanted)))


def with_key(o):
    o.param_groups[0]["f"] = print


def with_set(o):
    o.state[o.param_groups[0]["params"][0]]["seen"] = {1}


def with_stranger(o):
    o.state[torch.zeros(3)]["step"] = 1


def with_more(o):
    o.add_param_group({"params": []})


class Unsaved(LR.LRScheduler):
    def get_lr(self):
        self.rule = print
        return [group["lr"] for group in self.optimizer.param_groups]


def on_rank_1(spoil):
    return lambda pipe: spoil(pipe.finish.optimizer) if hvd.rank() else None


@as_ranks(2)
def test_what_cannot_be_saved_is_refused_by_name():
    for settings, spoil, message in (
        ({}, on_rank_1(with_key), r"rank 1: param_groups\[0\]\['f'\] of SGD has the type builtin_function_or_method"),
        ({}, on_rank_1(with_set), r"rank 1: '1.line.weight': its state 'seen' in SGD has the type set"),
        ({}, on_rank_1(with_stranger), r"rank 1: SGD has 'state of a tensor \[3\]', which belongs to no parameter"),
        (
            {"rate": RATES["StepLR"]},
            on_rank_1(with_more),
            "rank 1: lr_scheduler's 'base_lrs' has 1 values for 2 ",
        ),
        ({"rate": Unsaved}, None, r"rank 0: lr_scheduler\['rule'\] has the type builtin"),
        ({"schedule": "continuous", "update": Sum}, None, "rank 0: the update Sum has 'total', which Stash does not"),
        ({"layer": Counting}, lambda pipe: vars(pipe.module[-2]).update(calls=print), r"1._extra_state\['calls'\] has"),
        (
            {"schedule": "continuous", "update": "stash"},
            lambda pipe: pipe.step(*rows(1)[0]),
            r"drain\(\).*HVD015",
        ),
    ):
        pipe = made(**settings)
        if spoil and not (settings.get("layer") and not hvd.rank()):
            spoil(pipe)
        for save in (pipe.state_dict, pipe.whole_state):
            with pytest.raises(ValueError, match=message):
                save()
        pipe.drain()
    pipe = made(rate=lambda o: LR.ExponentialLR(o, 0.7 + hvd.rank() / 10))
    with pytest.raises(ValueError, match="lr_scheduler differs between stages: 'gamma' is another on rank 1"):
        pipe.whole_state()


@as_ranks(2)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    rate = RATES["StepLR"]
    kinds = {
        "plain": {}, "rate": {"rate": rate}, "cosine": {"rate": RATES["CosineAnnealingLR"]}, "scaler": {"scale": 2},
        "groups": {"make": groups}, "pipemare": {"schedule": "continuous", "update": "pipemare"},
        "counting": {"layer": Counting},
    }  # fmt: skip
    pipes = {kind: steps(made(**settings), rows(2)) for kind, settings in kinds.items()}
    whole = {kind: hvd.broadcast_object(pipe.whole_state()) for kind, pipe in pipes.items()}
    weights = hvd.broadcast_object(
        parallel.whole_state(pipes["plain"].module, hvd.Mesh(pp=2), pipes["plain"].finish.optimizer)
    )
    swapped = hvd.allgather_object(pipes["plain"].state_dict())[1 - hvd.rank()]
    for kind, saved, message in (
        ("plain", weights, "has no 'pipeline/batches'"),
        ("plain", whole["rate"], "the checkpoint has the setting 'lr_scheduler', but the pipeline has not"),
        ("rate", whole["plain"], "the pipeline has the setting 'lr_scheduler', but the checkpoint has not"),
        ("cosine", whole["rate"], "lr_scheduler is a CosineAnnealingLR with .* but the checkpoint's has"),
        ("scaler", whole["plain"], "the pipeline has the setting 'scaler', but"),
        ("pipemare", whole["plain"], r"has \['version'\] of its update, but PipeMare needs \['drift', 'version'\]"),
        ("plain", whole["groups"], "'0.line.weight' and '0.line.bias' are in .* 'weight_decay' is 0.1 for .* 0.0 for"),
        ("plain", swapped, "the part was saved with the place in the mesh {'pp': 1}, but this rank has {'pp': 0}"),
    ):  # fmt: skip
        pipe = pipes[kind]
        before = filed(pipe.state_dict())
        with pytest.raises(ValueError, match="rank 0: .*" + message + ".*HVD018"):
            (pipe.load_state_dict if saved is swapped else pipe.load_whole)(saved)
        assert alike(pipe.state_dict(), before)
    for kind, more, message in (
        ("pipemare", "pipeline/update/drift/0.", "no mean step of '0.line.weight'.*begins at 0"),
        ("counting", "1._extra_state", "no '1._extra_state': the module keeps its own"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipes[kind].load_whole(without(whole[kind], more))
        told = [str(each.message) for each in caught]
        assert len(told) == (hvd.rank() == int(kind == "counting")) and all(re.search(message, each) for each in told)
