"""What does a pipeline say to settings, mini-batches and calls that cannot work?

Each text ends with its code; errors that concern several ranks are raised on all of them.
"""

import warnings

import pytest
import torch.nn.functional as F
from ranks import as_ranks
from small_pipelines import Mlp, made, pipeline, rows, sgd
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel


def distributed(params):
    return hvd.DistributedOptimizer(sgd(params))


def no_update(stage, stages, m, batches):
    return [("F", 0), ("B", 0)]


@as_ranks(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"m": 0}, "micro_batches must be a whole number of at least 1, not 0"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'; there are 1f1b, continuous, gpipe"),
        ({"update": "x"}, "there is no update 'x'"),
        ({"shapes": "never"}, "there is no shapes 'never'; there are each, once, step"),
        ({"schedule": "continuous"}, "update 'flush' does not support schedule 'continuous'"),
        ({"update": "stash"}, "update 'stash' does not support schedule '1f1b'"),
        ({"schedule": "continuous", "update": "2bw", "m": 1}, "2bw needs at least as many micro-batches"),
        ({"schedule": "continuous", "update": "pipemare", "checkpoint": True}, "does not support checkpoint=True"),
        ({"schedule": no_update}, "the list of stage 0 leaves out"),
        ({"make": distributed}, "pass the plain optimizer to Pipeline"),
        ({"tied": [("t", {0: "0.weight"})]}, r"tied weight 't' names the stages \[0\], but must name two or more of 2"),
    ],
)
def test_settings_that_do_not_go_together(given, message):
    with pytest.raises(ValueError, match=message + r".*\[HVD01[12]\]"):
        pipeline([Mlp(), Mlp()], **given)


@as_ranks(2)
def test_ranks_that_give_other_settings():
    with pytest.raises(hvd.HvdMismatchError, match=r"rank 0 has \(4, .*rank 1 has \(8, .*HVD011"):
        pipeline([Mlp(), Mlp()], 4 * (1 + hvd.rank()))


@as_ranks(1)
def test_bad_mini_batches_and_calls():
    mesh = hvd.Mesh(dp=1, pp=1)
    stage = parallel.split([Mlp(), Mlp()], mesh, [2])
    pipe = parallel.Pipeline(stage, sgd(stage.parameters()), mesh, F.cross_entropy, 3)
    (x, y), _ = rows(2)
    for given, message in [
        ((x, y), r"8 rows cannot be split into 3 .* split into 1, 2, 4, 8\. Drop the last"),
        ((x[:0], y[:0]), "0 rows cannot"),
        ((None, y), "x, which the first stage reads, must be a tensor, .* not None"),
        ((x[:6], None), "y, which the last stage reads"),
        (((x, x[:3]), y), "different numbers of rows: 3, 8"),
    ]:
        with pytest.raises(ValueError, match=message + r".*\[HVD010\]"):
            pipe.step(*given)
    pipe.step(x[:6], y[:6])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipe.step(x[:6, :3], y[:6])
    with pytest.raises(ValueError, match=r"an earlier step raised an error.*HVD015"):
        pipe.step(x[:6], y[:6])


@as_ranks(2)
def test_a_pipeline_that_is_left_in_flight_says_so():
    pipe = pipeline([Mlp(), Mlp()], 1, sgd, schedule="continuous", update="stash")
    for x, y in rows(3):
        pipe.step(x, y)
    with pytest.raises(ValueError, match=r"evaluate while \d micro-batches are in flight.*HVD015"):
        pipe.evaluate(*rows(1)[0]) if hvd.rank() == 0 else pipe.evaluate()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del pipe
    assert any("updates left" in str(each.message) for each in said)


@as_ranks(2)
def test_an_output_that_does_not_learn():
    detached = made(lambda place: nn.Sequential(Mlp()))[:2]
    detached[0].register_forward_hook(lambda module, given, out: out.detach())
    pipe = pipeline(detached, 1, sgd)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe.step(*rows(1)[0])
    assert any("HVD020" in str(each.message) for each in said) == (hvd.rank() == 0)
