"""What tests/fuzz/ keeps for the decoders in Python, and mutations of it, the same in every run; and that a target can
fail: each sees through a decoder that was weakened."""

import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent.parent / "fuzz"
sys.path.insert(0, str(FUZZ))
import decoders  # noqa: E402
import run  # noqa: E402

STREAM = decoders.accepting.Stream


@pytest.fixture(autouse=True)
def modules_as_they_were(monkeypatch):
    """Targets give modules another clock and other random numbers; every test begins and ends with the true ones."""
    import os
    import time

    yield
    for module in (decoders.server, decoders.epochs, decoders.strangers, decoders.accepting, decoders.connector):
        module.time = time
    decoders.handshake.os = os
    decoders.accepting.Stream = STREAM


@pytest.mark.parametrize("target", decoders.TARGETS)
def test_kept_inputs_and_mutations_of_them(target):
    kept = run.read_kept(target)
    assert kept
    assert decoders.play_mutations(target, kept, seed=1, inputs=1500) == len(kept) + 1500


WEAKENED = [
    ("proof", decoders.handshake.hmac, "compare_digest", lambda one, other: True),
    ("address", decoders.places, "ENDS_MAX", 1000),
    (
        "frames",
        decoders.framing,
        "unpack_round",
        lambda body: (decoders.framing._LENGTH.unpack_from(body)[0], body[4:]),
    ),
    ("frames", decoders.framing.Session, "is_true", lambda *said: True),
    ("store", decoders.epochs.Epochs, "check", lambda *said: None),
    ("listener", decoders.accepting.peer_claim, "verdict_on", lambda claim, expected: decoders.handshake.WELCOME),
    ("dial", decoders.handshake.Connector, "session", lambda *said: decoders.framing.Session()),
]


@pytest.mark.parametrize("target, module, name, weak", WEAKENED, ids=[each[0] for each in WEAKENED])
def test_a_weakened_decoder_is_found(target, module, name, weak, monkeypatch):
    monkeypatch.setattr(module, name, weak)
    with pytest.raises(AssertionError, match=f"target {target} fails on the input [0-9a-f]*$"):
        decoders.play_mutations(target, run.read_kept(target), seed=1, inputs=3000)


def test_the_same_seed_is_the_same_run():
    import random

    kept = run.read_kept("store")
    runs = [[decoders.mutated(kept, chance) for _ in range(50)] for chance in (random.Random(3), random.Random(3))]
    assert runs[0] == runs[1] and len(set(runs[0])) > 25
