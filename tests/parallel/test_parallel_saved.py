"""Is a GPT in parts that of one process when a step is skipped, and when it is saved and loaded into other parts?

A GradScaler's skipped step must be skipped by all stages; a checkpoint must go on in any layout, with the optimizer's
state; one that does not fit must change nothing.
"""

import pytest
import torch
import torch.nn.functional as F
from gpt import gpt
from ranks import as_ranks
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel.checkpoint_values import alike

WORDS, LENGTH, ROWS, PARTS = 24, 8, 8, 4


class Alone:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


def batch(step, copy=0):
    ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + copy))
    return ids[:, :-1], ids[:, 1:]


def layers(tp):
    torch.manual_seed(3)
    return gpt(WORDS, LENGTH, 16, 4, 2, tp)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@as_ranks(4)
@pytest.mark.parametrize("axes", [{"dp": 1, "pp": 2, "tp": 2}, {"dp": 2, "pp": 2, "tp": 1}])
def test_an_infinite_loss_is_skipped_by_all_stages(axes):
    """One of one copy's micro-batches of step 1 has it."""
    mesh = hvd.Mesh(**axes)
    tp, copies, calls = mesh.group("tp"), mesh.shape["dp"], []

    def loss(scores, y):
        calls.append(y)
        infinite = len(calls) == PARTS + 2 and mesh.coordinate("dp") == 0
        return parallel.vocab_cross_entropy(scores, y, WORDS, tp) * (float("inf") if infinite else 1)

    stage = parallel.split(layers(tp), mesh, [2, 2])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipe = parallel.Pipeline(stage, sgd(stage.parameters()), mesh, loss, PARTS, scaler=scaler)
    whole, scales = nn.Sequential(*layers(Alone)), []
    optimizer = sgd(whole.parameters())
    for step in range(3):
        pipe.step(*batch(step, mesh.coordinate("dp")))
        scales.append(scaler.get_scale())
        if step != 1:
            optimizer.zero_grad()
            for x, y in (batch(step, copy) for copy in range(copies)):
                (F.cross_entropy(whole(x).flatten(0, 1), y.flatten()) / copies).backward()
            optimizer.step()
    assert scales == [1024.0, 512.0, 512.0]
    weights = parallel.whole_state(stage, mesh)
    if hvd.rank() == 0:
        torch.testing.assert_close(weights, dict(whole.named_parameters()), atol=1e-6, rtol=0)


@as_ranks(2)
def test_a_step_is_skipped_with_weights_in_other_memory_formats():
    """And a stage whose optimizer keeps nothing loads a checkpoint in which others have something."""
    mesh = hvd.Mesh(pp=2)
    net = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Sequential(nn.Flatten(), nn.Linear(144, 2))]
    stage = parallel.split(net, mesh, [1, 1])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9 * hvd.rank())
    scaler, factors = torch.amp.GradScaler("cpu", init_scale=1024.0), [float("inf"), 1.0]
    pipe = parallel.Pipeline(
        stage, optimizer, mesh, lambda out, y: F.cross_entropy(out, y) * factors.pop(0), 1, scaler=scaler, timeout=20
    )
    for scale in (512.0, 512.0):
        pipe.step(torch.ones(2, 3, 8, 8), torch.tensor([0, 1]))
        assert scaler.get_scale() == scale
    saved = hvd.broadcast_object(parallel.whole_state(stage, mesh, optimizer))
    assert {name for name in saved if name.endswith("/momentum_buffer")} == {
        f"optimizer/1.1.{name}/momentum_buffer" for name in ("weight", "bias")
    }
    parallel.load_whole(stage, saved, mesh, optimizer)


def training(axes):
    mesh = hvd.Mesh(**axes)
    tp = mesh.group("tp") if "tp" in axes else Alone
    stage = parallel.split(layers(tp), mesh, parallel.partition([1] * 4, mesh.shape["pp"]))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    pipe = parallel.Pipeline(
        stage, optimizer, mesh, lambda scores, y: parallel.vocab_cross_entropy(scores, y, WORDS, tp), PARTS
    )
    return stage, mesh, optimizer, lambda steps: [pipe.step(*batch(n), everywhere=True).item() for n in steps]


@as_ranks(4)
def test_training_goes_on_in_any_layout():
    """With dp=4 every rank has the whole model, and the same batches."""
    stage, mesh, optimizer, steps = training({"pp": 2, "tp": 2})
    steps(range(2))
    saved = hvd.broadcast_object(parallel.whole_state(stage, mesh, optimizer))
    wanted = steps(range(2, 5))
    for axes in ({"pp": 2, "tp": 2}, {"pp": 4}, {"pp": 1, "tp": 4}, {"dp": 4, "pp": 1}):
        stage, mesh, optimizer, steps = training(axes)
        parallel.load_whole(stage, saved, mesh, optimizer)
        whole = hvd.broadcast_object(parallel.whole_state(stage, mesh, optimizer, root_rank=3), 3)
        assert alike(whole, saved)
        assert steps(range(2, 5)) == pytest.approx(wanted, abs=1e-5)


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 3))
    bias, weight = torch.zeros(3), torch.zeros(3, 2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for whole, message in (
        ({"0.weight": weight, "1.bias": bias}, r"the checkpoint has no '0.bias'; it has '0.weight', '1.bias'"),
        (
            {"0.weight": weight.T, "0.bias": bias},
            r"'0.weight' has shape \[2, 3\] in the checkpoint.*, but the model has \[3, 2\]",
        ),
        ({"0.weight": weight, "0.bias": bias}, "the checkpoint has no optimizer state"),
    ):
        with pytest.raises(ValueError, match=message + ".*HVD018"):
            parallel.load_whole(model, whole, optimizer=sgd(model.parameters()))
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_count_of_steps_lies_where_the_optimizer_keeps_it():
    """A fused or capturable one on a GPU has it there; the meta device stands for it."""
    model = nn.Linear(2, 3, device="meta")
    kept = {f"optimizer/{name}/step": torch.tensor(7.0) for name in ("weight", "bias")}
    for capturable, device in ((False, "cpu"), (True, "meta")):
        optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)
        with pytest.warns(UserWarning, match=r"no hyperparameters .*HVD018"):  # as older checkpoints
            parallel.load_whole(model, {**nn.Linear(2, 3).state_dict(), **kept}, optimizer=optimizer)
        assert optimizer.state[model.weight]["step"].device.type == device


class Rotary(nn.Module):
    """A layer with a complex buffer."""

    def __init__(self, ready=True):
        super().__init__()
        self.line, self.ready = nn.Linear(4, 4), ready
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0) + hvd.rank()))

    def get_extra_state(self):
        if not self.ready:
            raise KeyError("not ready")

    def set_extra_state(self, state):
        pass


@as_ranks(2)
def test_complex_buffers_and_an_exception_while_saving():
    mesh = hvd.Mesh(pp=2)
    stage = parallel.split([Rotary(), Rotary()], mesh, [1, 1])
    whole = hvd.broadcast_object(parallel.whole_state(stage, mesh), 0)
    assert whole["1.turns"].dtype == torch.complex64 and whole["0.turns"][0].imag == 0 != whole["1.turns"][0].imag
    kept = dict(stage.named_buffers())[f"{hvd.rank()}.turns"].clone()
    dict(stage.named_buffers())[f"{hvd.rank()}.turns"].zero_()
    parallel.load_whole(stage, whole)
    assert torch.equal(dict(stage.named_buffers())[f"{hvd.rank()}.turns"], kept)
    stage[0].ready = hvd.rank() == 0
    with pytest.raises(KeyError if hvd.rank() else ValueError, match="not ready"):
        parallel.whole_state(stage, mesh)
