"""What do users of pipelines stumble over? Skips and masks, shapes that change, dropout, tied weights, evaluation.

Each case trains the same layers in one process that accumulates, and compares; then the errors of bad input, and the
negative controls, which must not agree.
"""

import pytest
import torch
import torch.nn.functional as F
from one_process import sha
from ranks import as_ranks
from small_pipelines import Mlp, adamw, alone, made, mlps, pipeline, rows, sgd, train
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel


class Skip(nn.Module):
    """Passes (h, kept, mask of integers, unused) on; the last one adds `kept` again."""

    def __init__(self, place):
        super().__init__()
        self.line, self.place = nn.Linear(12, 12), place

    def forward(self, h, kept=None, mask=None, unused=None):
        if self.place == 0:
            return (
                torch.tanh(self.line(h)),
                h * 2 + self.line(h),
                (h.sum(-1, keepdim=True) > 0).long(),
                h @ self.line.weight,
            )
        h = torch.tanh(self.line(h)) * mask
        return h + kept if self.place == 3 else (h, kept, mask, unused)


@as_ranks(4)
def test_skips_and_masks_travel_with_the_activations():
    assert sha(train(made(Skip), rows()).parameters()) == sha(alone(made(Skip), rows()).parameters())


@as_ranks(4)
@pytest.mark.parametrize("shapes", ["step", "each"])
def test_sequences_of_other_lengths(shapes):
    g = torch.Generator().manual_seed(5)
    batches = [(torch.randint(0, 9, (8, t), generator=g), torch.randint(0, 12, (8, t), generator=g)) for t in (3, 7, 5)]

    def texts():
        return made(lambda place: Mlp() if place else nn.Sequential(nn.Embedding(9, 12), Mlp()))

    def entropy(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    stage = train(texts(), batches, loss=entropy, shapes=shapes)
    assert sha(stage.parameters()) == sha(alone(texts(), batches, loss=entropy).parameters())


@as_ranks(4)
@pytest.mark.parametrize("rest", [{}, {"schedule": "continuous", "update": "stash"}])
def test_checkpoint_gives_the_bits_of_dropout_without_it(rest):
    def dropped(checkpoint):
        layers = made(lambda _: Mlp(0.5))
        torch.manual_seed(100 + hvd.rank())
        return sha(train(layers, rows(), checkpoint=checkpoint, **rest).parameters())

    assert dropped(True) == dropped(False)


@as_ranks(4)
def test_batch_norm_has_the_statistics_of_one_process():
    def norms():
        return made(lambda _: nn.Sequential(Mlp(), nn.BatchNorm1d(12)))

    stage, whole = train(norms(), rows()), alone(norms(), rows())
    assert all(torch.equal(a, b) for a, b in zip(stage.buffers(), whole.buffers()))
    with pytest.warns(UserWarning, match="HVD021"):
        pipeline(norms(), checkpoint=True)


class Table(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.weight, self.reads = nn.Parameter(torch.randn(9, 12)), reads

    def forward(self, x):
        return F.embedding(x, self.weight) if self.reads else F.linear(x, self.weight)


@as_ranks(4)
def test_tied_weights_of_the_first_and_the_last_stage():
    g = torch.Generator().manual_seed(5)
    batches = [(torch.randint(0, 9, (8,), generator=g), torch.randint(0, 9, (8,), generator=g)) for _ in range(3)]

    def layers():
        four = made(lambda place: Mlp() if place in (1, 2) else Table(place == 0))
        four[3].weight.data.copy_(four[0].weight.data)
        return four

    tied = [("table", {0: "0.weight", 3: "3.weight"})]
    stage = train(layers(), batches, make=sgd, tied=tied)
    whole = layers()
    whole[3].weight = whole[0].weight
    optimizer = sgd(nn.Sequential(*whole).parameters())
    for x, y in batches:
        for k in range(4):
            (F.cross_entropy(nn.Sequential(*whole)(x.chunk(4)[k]), y.chunk(4)[k]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(stage.parameters(), whole[hvd.rank()].parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    copies = hvd.allgather_object(sha(stage.parameters()))
    assert copies[0] == copies[3]
    different = made(lambda place: Mlp() if place in (1, 2) else Table(place == 0))
    with pytest.raises(hvd.HvdMismatchError, match=r"'table' on ranks 0 and 3 differ.*HVD022"):
        pipeline(different, tied=tied)


@as_ranks(4)
def test_evaluate_and_predict_between_steps():
    pipe, batches = pipeline(mlps(), make=sgd), rows(3)
    wide = tuple(torch.cat(parts) for parts in zip(*rows(2, 5)))  # 10 rows in parts of 3, 3, 2, 2
    whole = nn.Sequential(*mlps())
    loss = pipe.evaluate(*batches[0], everywhere=True)
    torch.testing.assert_close(loss.float(), F.cross_entropy(whole(batches[0][0]), batches[0][1]).detach())
    pipe.step(*batches[0])
    one = pipe.evaluate(*wide)
    out = pipe.predict(wide[0])
    few = pipe.predict(wide[0][:2])
    assert (one is None) == (out is None) == (hvd.rank() < 3)
    if out is not None:
        torch.testing.assert_close(one, F.cross_entropy(out, wide[1]))
        torch.testing.assert_close(few, out[:2])
    for x, y in batches[1:]:
        pipe.step(x, y)
    assert sha(pipe.module.parameters()) == sha(alone(mlps(), batches, make=sgd).parameters())


@as_ranks(4)
@pytest.mark.parametrize("update", ["stash", "vertical"])
def test_drained_after_each_step_it_is_a_flush(update):
    def trained(**rest):
        pipe = pipeline(mlps(), 1, sgd, **rest)
        for x, y in rows(6):
            pipe.step(x, y)
            pipe.drain()
        return sha(pipe.module.parameters())

    assert trained(schedule="continuous", update=update) == trained(schedule="gpipe")


@as_ranks(2)
@pytest.mark.parametrize(("m", "update", "copies"), [(2, "flush", (1, 1)), (1, "stash", (2, 1)), (2, "2bw", (2, 2))])
def test_a_drawing_tells_what_a_run_needs(m, update, copies, tmp_path):
    pipe = pipeline(mlps()[:2], m, schedule="1f1b" if update == "flush" else "continuous", update=update)
    drawing = pipe.explain(save=str(tmp_path / "plan.svg"))
    for x, y in rows(4):
        pipe.step(x, y)
    pipe.drain()
    me = hvd.rank()
    assert pipe.weights.peak == copies[me]
    assert f"stage {me}: stash {pipe.peak_stash}, weights {copies[me]}" in drawing
    assert "</svg>" in (tmp_path / "plan.svg").read_text()


class Structured(nn.Module):
    """(h, side) or h -> (h, side), where side has None, numbers, words, a list, a dictionary and a 0-dim tensor."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(12, 12)

    def forward(self, x, side=None):
        if side is None:
            h, scale = x["rows"], x["scale"]
            return self.line(h), {"mask": x["mask"], "none": None, "more": [h.mean(), (scale, "word", 0.5, True)]}
        mean, (scale, word, half, yes) = side["more"]
        assert (side["none"], word, half, yes, side["mask"].dtype) == (None, "word", 0.5, True, torch.bool)
        return self.line(x) * scale * half + mean * side["mask"], side


def structured_loss(out, y):
    return F.cross_entropy(out[0] + out[1]["more"][0], y["class"])


@as_ranks(2)
def test_stages_exchange_dictionaries_and_plain_values():
    batches = [({"rows": x, "mask": x > 0, "scale": 2}, {"class": y, "unused": None}) for x, y in rows()]
    layers = made(lambda _: Structured())
    wanted = made(lambda _: Structured())
    optimizer = adamw([p for layer in wanted for p in layer.parameters()])
    for x, y in batches:
        for part in range(4):
            values = ({"rows": x["rows"].chunk(4)[part], "mask": x["mask"].chunk(4)[part], "scale": 2},)
            for layer in wanted:
                values = layer(*values)
            (structured_loss(values, {"class": y["class"].chunk(4)[part]}) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    balance = parallel.profile([*layers], batches[0][0]).costs
    assert len(balance) == 4
    pipe = pipeline(layers, 4, loss=structured_loss)
    for x, y in batches:
        pipe.step(x, y)
    for mine, whole in zip(pipe.module, wanted[2 * hvd.rank() :]):
        assert torch.equal(mine.line.weight, whole.line.weight)
    out = pipe.predict(batches[0][0])
    if out is not None:
        assert out[0].shape == (8, 12) and out[1]["more"][0].shape == (4,) and out[1]["none"] is None
        assert torch.equal(out[1]["mask"], batches[0][0]["mask"])
    loss = pipe.evaluate(*batches[0])
    assert (loss is None) == (hvd.rank() == 0)


def summed(out, y):
    return F.cross_entropy(out, y, reduction="sum")  # -100 does not count


@as_ranks(2, 4)
def test_the_loss_of_what_counts_in_micro_batches_and_copies_of_other_lengths():
    mesh = hvd.Mesh(dp=-1, pp=2)
    copies, copy = mesh.shape["dp"], mesh.coordinate("dp")
    torch.manual_seed(3)
    x, y = torch.randn(3, 16, 12), torch.randint(12, (3, 16))
    y[:, :5] = y[1, 7] = -100
    one = nn.Sequential(*mlps())
    optimizer = sgd(one.parameters())
    for schedule in ("gpipe", "continuous"):
        one, update = nn.Sequential(*mlps()), "flush" if schedule == "gpipe" else "stash"
        optimizer = sgd(one.parameters())
        stage = parallel.split(mlps(), mesh, [2, 2])
        pipe = parallel.Pipeline(
            stage,
            sgd(stage.parameters()),
            mesh,
            summed,
            4,
            schedule,
            update,
            count=lambda y: (y != -100).sum(),
            timeout=20,
        )
        for rows_of, wanted in zip(x, y):
            mean = pipe.step(rows_of.chunk(copies)[copy], wanted.chunk(copies)[copy], everywhere=True)
            pipe.drain()
            optimizer.zero_grad()
            loss = F.cross_entropy(one(rows_of), wanted)
            loss.backward()
            optimizer.step()
            assert hvd.allreduce(mean).item() == pytest.approx(loss.item(), rel=1e-5)
        found = dict(one.named_parameters())
        for name, p in stage.named_parameters():
            assert torch.allclose(p, found[name], rtol=1e-5, atol=1e-6), name
        mean = pipe.evaluate(x[0], y[0], everywhere=True)
        assert mean.item() == pytest.approx(F.cross_entropy(one(x[0]), y[0]).item(), rel=1e-5)
