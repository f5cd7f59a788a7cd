"""What once gave wrong numbers, a failed job or no word at all: each case as it was found."""

import contextlib

import pytest
import torch
from launching import Launch
from one_process import sha
from ranks import EVERYTHING, as_ranks
from small_pipelines import Mlp, mlps, pipeline, rows, sgd, train
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel

ENDS = """
import torch, hvdlite.torch as hvd
from hvdlite import parallel
hvd.init()
mesh = hvd.Mesh(pp=2)
stage = parallel.split([torch.nn.Linear(8, 500), torch.nn.Linear(500, 8)], mesh, [1, 1])
pipe = parallel.Pipeline(stage, torch.optim.SGD(stage.parameters(), lr=0.1), mesh, torch.nn.functional.mse_loss, 4)
for _ in range(3):
    pipe.step(torch.ones(8, 8), torch.ones(8, 8))
"""


def test_a_script_may_end_after_its_last_step(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    for _ in range(3 if EVERYTHING else 1):  # each imports torch anew
        with Launch("-np", 2, "python", tmp_path / "ends.py", merged=True) as job:
            assert job.wait(60) == 0, job.out


def reversed_on_the_last(stage, stages, m, batches=1):
    order = range(m - 1, -1, -1) if stage == stages - 1 else range(m)
    return [("F", k) for k in range(m)] + [("B", k) for k in order] + [("U", 0)]


@as_ranks(2)
def test_neighbours_may_order_micro_batches_differently():
    stages = [train(mlps()[:2], rows(2, 16), 8, make=sgd, schedule=each) for each in ("gpipe", reversed_on_the_last)]
    for one, other in zip(*(stage.parameters() for stage in stages)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@as_ranks(2)
@pytest.mark.parametrize("update", ["stash", "vertical", "2bw", "pipemare"])
def test_what_was_loaded_is_what_the_next_step_sees(update):
    torch.manual_seed(9)
    shapes = {"weight": (12, 12), "bias": (12,)}
    whole = {f"{i}.line.{name}": torch.randn(shape) for i in (0, 1) for name, shape in shapes.items()}

    def trained(steps_before):
        pipe = pipeline(mlps()[:2], 4, sgd, schedule="continuous", update=update)
        for x, y in rows(steps_before):
            pipe.step(x, y)
        if steps_before:
            with pytest.raises(ValueError, match=r"in flight: call drain\(\) first \[HVD015\]"):
                parallel.load_whole(pipe.module, whole)
        pipe.drain()
        if update == "pipemare" and steps_before:  # what it knows of earlier steps stays
            pipe.weights._drift = {name: torch.zeros_like(d) for name, d in pipe.weights._drift.items()}
        parallel.load_whole(pipe.module, whole)
        for x, y in rows(3):
            pipe.step(x, y)
        pipe.drain()
        return sha(pipe.module.parameters())

    assert trained(0) == trained(2)


@as_ranks(2)
@pytest.mark.parametrize("update", ["stash", "pipemare"])
def test_autocast_around_the_step(update):
    class Cast(Mlp):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                return super().forward(x).float()

    def trained():
        torch.manual_seed(2)
        pipe = pipeline([Cast(), Cast()], 2, sgd, schedule="continuous", update=update)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            for x, y in rows(4):
                pipe.step(x, y)
        pipe.drain()
        return sha(pipe.module.parameters())

    inside = True
    cast_inside = trained()
    inside = False
    assert trained() == cast_inside


@as_ranks(2)
def test_a_loader_may_fill_one_buffer_again():
    def trained(again):
        pipe, held = pipeline(mlps()[:2], 1, sgd, schedule="continuous", update="stash"), torch.empty(8, 12)
        for x, y in rows(4):
            pipe.step(torch.from_numpy(held.numpy()) if again and held.copy_(x) is held else x, y)
        pipe.drain()
        return sha(pipe.module.parameters())

    assert trained(True) == trained(False)


@as_ranks(2)
def test_two_pipelines_by_turns():
    pipes = [pipeline(mlps()[:2], 1, sgd, schedule="continuous", update="stash") for _ in range(2)]
    for x, y in rows(4):
        for pipe in pipes:
            pipe.step(x, y)
    for pipe in pipes:
        pipe.drain()
    one = train(mlps()[:2], rows(4), 1, make=sgd, schedule="continuous", update="stash")
    assert {sha(pipe.module.parameters()) for pipe in pipes} == {sha(one.parameters())}
    assert pipes[0].name != pipes[1].name


class Masked(Mlp):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("mask", torch.ones(1), persistent)


@as_ranks(2)
def test_buffers_that_belong_to_one_layers_state_only():
    layers = [Masked(False), Masked(True)]
    whole = parallel.whole_state(parallel.split(layers, hvd.Mesh(pp=2), [1, 1]), hvd.Mesh(pp=2))
    if hvd.rank() == 0:
        assert set(whole) == set(nn.Sequential(*layers).state_dict())
        parallel.load_whole(nn.Sequential(*layers), whole)


@as_ranks(2)
def test_a_factored_state_of_a_cut_weight_is_refused():
    tp = hvd.Mesh(tp=2)
    layer = parallel.ColumnLinear(4, 8, tp.group("tp"))
    optimizer = torch.optim.Adafactor(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"its state 'row_var' in Adafactor.*HVD018"):
        parallel.whole_state(layer, tp, optimizer)


def others(params):
    return sgd(Mlp().parameters())


@as_ranks(1)
@pytest.mark.parametrize(
    ("make", "rest", "message"),
    [
        (print, {}, "has none of the stage's parameters"),
        (others, {}, "has none of the stage's parameters"),
        (torch.optim.LBFGS, {}, "LBFGS computes the loss several times"),
        (sgd, {"loss": None}, "the last stage calls loss"),
        (sgd, {"clip": 0.0}, "clip must be more than 0"),
        (sgd, {"update": print}, "a name or a subclass"),
        (sgd, {"schedule": ["F"]}, "there is no schedule"),
    ],
    ids=range(7),
)
def test_parts_that_cannot_train(make, rest, message):
    with pytest.raises(ValueError, match=message + r".*\[HVD011\]"):
        pipeline([Mlp()], make=make, **rest)


@as_ranks(1)
def test_no_step_without_gradients_and_no_evaluation_after_an_error():
    pipe = pipeline([Mlp()], 2, sgd)
    (x, y), _ = rows(2)
    with torch.no_grad(), pytest.raises(ValueError, match=r"outside torch.no_grad\(\) \[HVD011\]"):
        pipe.step(x, y)
    assert pipe.evaluate(x, y) > 0
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipe.step(x[:, :3], y)
    with pytest.raises(ValueError, match=r"an earlier step raised.*HVD015"):
        pipe.evaluate(x, y)


@as_ranks(1)
def test_layers_whose_weights_others_read():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1)
    with pytest.raises(ValueError, match=r"a TransformerEncoderLayer, which reads .* in evaluation.*HVD019"):
        parallel.parallelize(encoder, {"*.linear1": "column"}, hvd.global_process_set)


@as_ranks(1)
@pytest.mark.parametrize("target", [torch.zeros(3, dtype=torch.int64), torch.zeros(2)])
def test_classes_that_do_not_fit_the_scores(target):
    with pytest.raises(ValueError, match=r"need integer classes of shape \[2\].*HVD017"):
        parallel.vocab_cross_entropy(torch.zeros(2, 5), target, 5, hvd.global_process_set)
