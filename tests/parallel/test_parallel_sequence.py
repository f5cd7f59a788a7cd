"""Layers on a sequence that is cut over ranks, against one process: gradients of all weights, pipelines, names in a
checkpoint, and the two faults of hand-made sequence parallelism."""

import copy
from types import SimpleNamespace

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import parallel as par  # noqa: E402

TP, ONE = hvd.global_process_set, SimpleNamespace(size=lambda: 1, rank=lambda: 0)
WIDTH, HEAD, LENGTH, WORDS = 8, 2, 6, 12


class Block(nn.Module):
    """(batch, length / n, width) both ways."""

    def __init__(self, tp, wrapped):
        super().__init__()
        self.one, self.two = wrapped(nn.LayerNorm(WIDTH)), wrapped(nn.LayerNorm(WIDTH))
        self.qkv = par.ColumnLinear(WIDTH, 3 * WIDTH, tp, unit=3 * HEAD, sequence=1)
        self.out = par.RowLinear(WIDTH, WIDTH, tp, unit=HEAD, sequence=1)
        self.up = par.ColumnLinear(WIDTH, 4 * WIDTH, tp, sequence=1)
        self.down = par.RowLinear(4 * WIDTH, WIDTH, tp, sequence=1)

    def forward(self, x):
        y = self.qkv(self.one(x))
        q, k, v = y.view(*y.shape[:2], -1, 3, HEAD).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.two(x))))


def layers(tp, wrapped=None):
    """Ids to this rank's part of the words. In one process with plain norms."""
    torch.manual_seed(3)
    wrapped = wrapped or (lambda norm: norm if tp is ONE else par.SequenceParallel(norm, tp))
    head = wrapped(nn.LayerNorm(WIDTH)), par.ColumnLinear(WIDTH, WORDS, tp, bias=False, sequence=1)
    blocks = [Block(tp, wrapped).double() for _ in range(2)]
    return [par.VocabEmbedding(WORDS, WIDTH, tp, sequence=1).double(), *blocks, nn.Sequential(*head).double()]


def batch(step, rows=4):
    ids = torch.randint(WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss_of(tp):
    return lambda scores, y: par.vocab_cross_entropy(scores, y, WORDS, tp)


@pytest.mark.parametrize("again", [False, True])
@as_ranks(2)
def test_gradients_of_a_cut_residual_stream_are_those_of_one_process(again):
    learned = []
    for tp in (ONE, TP):
        model = nn.Sequential(*layers(tp))
        for p in model[1].two.parameters():
            p.requires_grad_(False)
        for step in range(3):  # accumulated
            x, y = batch(step)
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            loss_of(tp)(x, y).backward()
        learned.append(dict(model.named_parameters()))
    whole, mine = learned
    assert list(whole) == list(mine) and mine["1.two.weight"].grad is None and len(mine) == 28
    for name, p in mine.items():
        if p.requires_grad:
            wanted = whole[name].grad.chunk(2, p.cut)[hvd.rank()] if hasattr(p, "cut") else whole[name].grad
            torch.testing.assert_close(p.grad, wanted, atol=1e-12, rtol=1e-12, msg=lambda m, name=name: name + m)


@as_ranks(2)
def test_the_parts_of_an_input_have_their_parts_of_its_gradient():
    x, y = torch.randn(2, 3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for tp in (ONE, TP):
        x.grad = x.requires_grad_().grad = None
        (par.gather_from(layers(tp)[1](par.split_to(x, 1, tp)), 1, tp) * y).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


def trained(axes, **rest):
    """The whole state on rank 0, and whether copies over tp are alike, after AdamW."""
    mesh = hvd.Mesh(**axes)
    tp = mesh.group("tp")
    stage = par.split(layers(tp), mesh, [2, 2])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    pipe = par.Pipeline(stage, optimizer, mesh, loss_of(tp), 2, checkpoint=True, clip=0.5, **rest)
    for step in range(5):
        pipe.step(*batch(step))
    pipe.drain()
    replicated = {name: p for name, p in stage.named_parameters() if not hasattr(p, "cut")}
    assert len(replicated) > 1
    hvd.check_consistency(replicated, process_set=tp)
    return par.whole_state(stage, mesh)


@pytest.mark.parametrize("rest", [{"schedule": "1f1b"}, {"schedule": "continuous", "update": "stash"}])
@as_ranks(4)
def test_a_pipeline_of_cut_sequences_trains_as_whole_ones(rest):
    found = trained({"dp": 1, "pp": 2, "tp": 2}, **rest)
    wanted = trained({"dp": 2, "pp": 2, "tp": 1}, **rest)  # copies with the same rows: as one
    if hvd.rank():
        return
    model = nn.Sequential(*layers(ONE))
    if rest["schedule"] == "1f1b":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            x, y = batch(step)
            optimizer.zero_grad()
            loss_of(ONE)(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    model.load_state_dict(found)


@as_ranks(2)
def test_a_wrapped_module_is_the_plain_one_to_all_but_autograd():
    plain = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    made = copy.deepcopy(par.SequenceParallel(par.SequenceParallel(plain, TP), TP, "n")).eval()
    assert list(made.state_dict()) == list(plain.state_dict())
    made.load_state_dict({name: t + 1 for name, t in plain.state_dict().items()})
    x = torch.randn(3, 4)
    assert torch.equal(made(x), made(x)) and not torch.equal(made(x), plain.eval()(x))
    assert torch.equal(par.SequenceParallel(nn.Dropout(0.5), TP).eval()(x), x)
    made(x).sum().backward()
    assert made.get_parameter("1.bias").grad.tolist() == [6.0] * 4  # three rows on each rank
    for p in made.parameters():
        p.requires_grad_(False)
    before = hvd.counters()["submits"]
    made(x.requires_grad_()).sum().backward()
    assert hvd.counters()["submits"] == before
    with pytest.raises(ValueError, match=r"rank \d: 'weight' of ColumnLinear is cut.*\[HVD038\]"):
        par.SequenceParallel(par.ColumnLinear(4, 4, TP), TP)


@as_ranks(4)
def test_gradients_are_added_once_or_an_error_names_the_remedy():
    mesh = hvd.Mesh(cp=2, tp=2)
    cp, tp = mesh.group("cp"), mesh.group("tp")
    column, norm = par.ColumnLinear(4, 4, tp, name="up"), nn.LayerNorm(4)
    brought = {
        "from_sequence": lambda x: par.from_sequence(x, 0, tp),
        "gather_from": lambda x: par.gather_from(x, 0, tp),
        "copy_to": lambda x: par.copy_to(x, tp),
        "another group": lambda x: par.from_sequence(x / 2, 0, cp),
    }
    for name, bring in brought.items():
        x = torch.ones(2, 4, requires_grad=True)
        column(bring(x)).sum().backward()
        wanted = par.reduce_from(column.weight.detach().sum(0), tp).expand(2, 4)
        torch.testing.assert_close(x.grad, wanted, msg=name)
        remedy = ("leave it out" if name == "copy_to" else "use gather_from") + ".*sequence="
        said = rf"'up'.* rank {hvd.rank()}: .*\[\d, 4\].*Add.*comes from {name}, .*{remedy}.*\[HVD038\]"
        if name in ("from_sequence", "copy_to"):
            with pytest.raises(ValueError, match=said):
                column(norm(bring(x)) + x.sum())
        else:
            column(norm(bring(x)) + x.sum())
    with pytest.raises(ValueError, match="comes from copy_to, .*sequence=.*HVD038"):  # forgotten
        column(par.SequenceParallel(norm, tp)(x))


@as_ranks(2)
def test_copies_of_a_bare_norm_drift_apart():
    for wrapped in (None, lambda norm: norm):
        model = nn.Sequential(*layers(TP, wrapped))
        loss_of(TP)(model(batch(0)[0]), batch(0)[1]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        replicated = {name: p for name, p in model.named_parameters() if not hasattr(p, "cut")}
        if wrapped:
            with pytest.raises(hvd.HvdMismatchError, match="1.one.weight"):
                hvd.check_consistency(replicated)
        else:
            hvd.check_consistency(replicated)
