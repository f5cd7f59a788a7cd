"""Training on n ranks is, bit by bit, one process that adds the ranks' gradients in rank order and scales them once.

What could make the bits differ is the order of additions, a second rounding of the scale, or where in a bucket a tensor
travelled. So every rank trains a small transformer for 20 steps, and rank 0 replays the job alone, with plain torch:
it computes every rank's gradients on that rank's batch, adds them in float32 in rank order, multiplies once by a factor
that was computed in double, and steps. Parameters and the optimizer's state must be equal in all bits, on all ranks.
Torch uses one thread, so that its own sums are the same in both; the last test shows that the comparison can fail.
"""

import contextlib
import hashlib
import os

import pytest
from ranks import as_ranks, everything

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite._core import ffi, lib  # noqa: E402

STEPS, WORDS, WIDTH, LENGTH, ROWS = 20, 13, 16, 6, 3
MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.003),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.003, weight_decay=0.1),
}


class Transformer(nn.Module):
    """Predicts the next of WORDS words: embedding, one block of attention and two linear layers, tied to nothing."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.word(words) + self.place
        q, k, v = (
            part.view(-1, LENGTH, 2, WIDTH // 2).transpose(1, 2) for part in self.attend(self.norm1(x)).chunk(3, 2)
        )
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        weight = (q @ k.transpose(2, 3) / (WIDTH // 2) ** 0.5).masked_fill(~seen, float("-inf")).softmax(3)
        x = x + self.out((weight @ v).transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.head(x)


def start(maker):
    """The model and optimizer that every rank starts with."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Transformer()
    return model, MAKERS[maker](model.parameters())


def loss_on(model, step, rank):
    """Loss on the batch of this rank in this step: sequences that count upwards by 1, 2 or 3."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    first, by = (
        torch.randint(WORDS, (ROWS, 1), generator=generator),
        torch.randint(1, 4, (ROWS, 1), generator=generator),
    )
    words = (first + by * torch.arange(LENGTH + 1)) % WORDS
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def train(maker, passes=1, **arguments):
    """The job as a user writes it; `passes` backward passes before each step."""
    model, optimizer = start(maker)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **arguments
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            loss_on(model, passes * step + each, hvd.rank()).backward()
        optimizer.step()
    return model, optimizer


def replay(maker, order, factor, passes=1):
    """The same in one process without hvdlite: gradients added in this order, times factor (None: as they are)."""
    model, optimizer = start(maker)
    for step in range(STEPS):
        sums = [torch.zeros(0)] * len(list(model.parameters()))
        for place, rank in enumerate(order):
            model.zero_grad()
            for each in range(passes):
                loss_on(model, passes * step + each, rank).backward()
            grads = [parameter.grad for parameter in model.parameters()]
            sums = grads if place == 0 else [sum + grad for sum, grad in zip(sums, grads)]
        for parameter, sum in zip(model.parameters(), sums):
            parameter.grad = sum if factor is None else sum * torch.tensor(factor, dtype=torch.float32)
        optimizer.step()
    return model, optimizer


def bits(model, optimizer):
    """A fingerprint of all parameters and of the optimizer's tensors."""
    state = [
        t for entry in optimizer.state_dict()["state"].values() for _, t in sorted(entry.items()) if torch.is_tensor(t)
    ]
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *state]:
        assert torch.isfinite(tensor).all()
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def assert_replayed(trained, maker, factor, passes=1):
    """All ranks have the bits of the replay, which rank 0 computes."""
    expected = bits(*replay(maker, range(hvd.size()), factor, passes)) if hvd.rank() == 0 else None
    assert bits(*trained) == hvd.broadcast_object(expected), "these are not the bits of one process"


@contextlib.contextmanager
def life_with(variable, value):
    """A life of hvdlite of its own, with this setting."""
    hvd.shutdown()
    os.environ[variable] = str(value)
    try:
        hvd.init()
        yield
    finally:
        del os.environ[variable]
        hvd.shutdown()


def times_learned():
    """How often a plan was learned in this life."""
    for i in range(100):
        if (name := lib.hvd_counter_name(i)) != ffi.NULL and ffi.string(name) == b"learned":
            return lib.hvd_counter(i)
    raise AssertionError("there is no such counter")


@pytest.mark.parametrize("maker", MAKERS)
@as_ranks(3, *everything(2))
def test_an_averaged_job_is_one_process_bit_for_bit(maker):
    assert_replayed(train(maker), maker, 1.0 / hvd.size())


@pytest.mark.parametrize("maker", ["sgd", *everything("adam", "adamw")])
@as_ranks(2, *everything(3))
def test_a_summed_job_is_one_process_bit_for_bit(maker):
    assert_replayed(train(maker, op=hvd.Sum), maker, None)


@as_ranks(4)
def test_four_ranks_are_one_process_bit_for_bit():
    assert_replayed(train("adamw"), "adamw", 1.0 / hvd.size())


@pytest.mark.parametrize("predivide", [3.0, *everything(2.0)])
@as_ranks(3)
def test_a_predivided_average_is_scaled_once(predivide):
    """1/f before the sum and f/n after it are one factor, rounded once, after the sum."""
    factor = (1.0 / predivide) * (predivide / hvd.size())
    assert_replayed(train("adam", gradient_predivide_factor=predivide), "adam", factor)


@as_ranks(3)
def test_several_backward_passes_are_one_process_bit_for_bit():
    assert_replayed(train("adam", passes=2), "adam", 1.0 / hvd.size(), passes=2)


@pytest.mark.parametrize("threshold", [0, 1000, *everything(1 << 20)])
@as_ranks(3)
def test_how_tensors_travel_together_changes_no_bit(threshold):
    with life_with("HVDLITE_FUSION_THRESHOLD", threshold):
        assert_replayed(train("adamw"), "adamw", 1.0 / hvd.size())


@as_ranks(3)
def test_deterministic_mode_has_the_bits_of_one_process_and_a_learned_plan():
    with life_with("HVDLITE_DETERMINISTIC", 1):
        assert_replayed(train("adamw"), "adamw", 1.0 / hvd.size())
        assert times_learned() >= 1  # where rounds fall otherwise a list is proposed once more


@as_ranks(2)
def test_ranks_that_do_not_agree_on_deterministic_mode_are_told_so():
    mine = str(hvd.rank())
    with pytest.raises(hvd.HvdInitError, match="deterministic.*rank 1"), life_with("HVDLITE_DETERMINISTIC", mine):
        pass


@as_ranks(3)
def test_another_order_of_addition_gives_other_bits():
    """The tests above can fail: rank order is what makes the bits."""
    if hvd.rank() == 0:
        turned = bits(*replay("sgd", [2, 1, 0], 1.0 / 3))
        assert turned != bits(*replay("sgd", [0, 1, 2], 1.0 / 3))
