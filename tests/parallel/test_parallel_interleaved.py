"""Stages of several chunks: the bits of one process, and what else a pipeline does."""

import pytest
import torch
import torch.nn.functional as F
from ranks import as_ranks
from small_pipelines import Mlp, adamw, rows, sgd
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel


def layers(count=8):
    torch.manual_seed(2)
    return [Mlp() for _ in range(count)]


def interleaved(model, m, chunks, make=adamw, **rest):
    mesh = hvd.Mesh(pp=hvd.size())
    stage = parallel.split(model, mesh, parallel.partition([1] * len(model), chunks * hvd.size()))
    optimizer = make(stage.parameters())
    return parallel.Pipeline(stage, optimizer, mesh, F.cross_entropy, m, "interleaved", timeout=20, **rest)


def one_process(model, m, batches, make=adamw):
    whole = nn.Sequential(*model)
    optimizer = make(whole.parameters())
    for x, y in batches:
        for part, target in zip(x.chunk(m), y.chunk(m)):
            (F.cross_entropy(whole(part), target) / m).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole


@as_ranks(2, 3)
def test_weights_loss_and_outputs_of_one_process():
    batches = rows(3, n=12)
    for m, chunks, rest in ((6, 2, {}), (6, 3, {"checkpoint": True}), (12, 2, {"shapes": "each"})):
        pipe, wanted = interleaved(layers(9), m, chunks, **rest), one_process(layers(9), m, batches)
        for x, y in batches:
            pipe.step(x, y)
        found = dict(wanted.named_parameters())
        for name, p in pipe.module.named_parameters():
            assert torch.equal(p, found[name]), (m, chunks, name)
        x, y = batches[0]
        assert pipe.evaluate(x[:7], y[:7], everywhere=True).item() == pytest.approx(
            F.cross_entropy(wanted(x[:7]), y[:7]).item(), rel=1e-6
        )
        out = pipe.predict(x)
        assert (out is None) == (hvd.rank() < hvd.size() - 1)
        assert out is None or torch.allclose(out, wanted(x), atol=1e-6)


@as_ranks(2)
def test_beside_clip_a_scaler_and_a_checkpoint_for_another_schedule():
    batches = rows(4, n=8)
    pipe = interleaved(layers(), 4, 2, clip=0.5, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    for x, y in batches[:2]:
        pipe.step(x, y, everywhere=True)
    whole = hvd.broadcast_object(pipe.whole_state(), 0)
    mesh = hvd.Mesh(pp=2)
    stage = parallel.split([Mlp() for _ in range(8)], mesh, [4, 4])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    other = parallel.Pipeline(
        stage, adamw(stage.parameters()), mesh, F.cross_entropy, 4, "gpipe", clip=0.5, scaler=scaler, timeout=20
    )
    other.load_whole(whole)
    for x, y in batches[2:]:
        pipe.step(x, y)
        other.step(x, y)
    one, two = (hvd.broadcast_object(each.whole_state(), 0) for each in (pipe, other))
    for name in dict(nn.Sequential(*layers()).named_parameters()):
        assert torch.allclose(one[name], two[name], rtol=1e-6, atol=1e-7), name  # norms add in another order


@as_ranks(2)
def test_what_does_not_go_together():
    mesh = hvd.Mesh(pp=2)
    for chunks, schedule, m, words in (
        (2, "1f1b", 4, "schedule '1f1b' does not support a stage of 2 chunks"),
        (1, "interleaved", 4, "schedule 'interleaved' does not support a stage of 1 chunk:"),
        (2, "interleaved", 3, "needs a multiple of 2 micro-batches"),
        (2, "continuous", 4, "update 'flush' does not support"),
    ):
        stage = parallel.split(layers(), mesh, [8 // (2 * chunks)] * (2 * chunks))
        with pytest.raises(ValueError, match=words + r".*HVD011"):
            parallel.Pipeline(stage, sgd(stage.parameters()), mesh, F.cross_entropy, m, schedule)
    with pytest.raises(ValueError, match="HVD013"):
        parallel.split(layers(), mesh, [2, 3, 3])


@as_ranks(2)
def test_the_layers_of_a_stage_and_the_drawing():
    pipe = interleaved(layers(), 2, 2)
    assert [name for name, _ in pipe.module.named_children()] == [["0", "1", "4", "5"], ["2", "3", "6", "7"]][
        hvd.rank()
    ]
    assert pipe.explain().splitlines()[:3] == [
        "stage 0  F0a F1a F0b F1b .   .   B0b---- .   B1b---- B0a---- B1a----|",
        "stage 1  .   F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a----|.   .",
        "makespan 7.5, busy 80%",
    ]
