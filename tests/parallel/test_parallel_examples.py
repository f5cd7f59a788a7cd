"""Do the examples of hvdlite.parallel and of hvd.rpc compute what one process does, and move the bytes that they say?

They run as programs, on as many ranks as their heads name; what they compare is read from what they print. And which
ranks are in a group of a mesh with three axes?
"""

import re

import pytest
import torch
from ranks import as_ranks, everything
from test_examples import run

import hvdlite.torch as hvd
from hvdlite import predict


def apart(output, what):
    (number,) = re.findall(rf"\b{what} (?:differ from those of one process )?by (\S+)", output)
    return float(number.rstrip(","))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (8, ["--clip", 0.5]),
        (4, ["--pp", 4, "--tp", 1, "--schedule", "gpipe"]),
        *everything((4, []), (2, ["--tp", 1, "--checkpoint"]), (1, ["--tp", 1, "--pp", 1])),
    ],
)
def test_a_gpt_on_a_mesh_trains_as_one_process_does(ranks, words, tmp_path):
    path = tmp_path / "gpt.pt"
    code, output = run(ranks, "14_pipeline.py", "--check", "--sgd", "--steps", 4, "--save", path, *words)
    assert code == 0, output
    assert apart(output, "losses and norms" if "--clip" in words else "losses") < 1e-5, output
    assert apart(output, "weights") < 1e-6, output
    one, other = re.findall(r"^.*evaluated .*loss (\S+)", output, re.M)
    assert float(one) == pytest.approx(float(other), abs=2e-6) and "5.scores.weight" in torch.load(path), output


def test_two_copies_of_a_divided_model_are_recorded_and_predicted(tmp_path):
    words = ["--dp", 2, "--tp", 1, "--steps", 18]
    code, output = run(4, "14_pipeline.py", *words, flags=("--record", tmp_path / "recorded"))
    assert code == 0, output
    job = predict.load(tmp_path / "recorded")
    assert (job.recording.size, job.recording.of_copy) == (2, 2)
    assert job.step(4).ms == pytest.approx(job.recording.step_ns.mean() / 1e6, rel=0.2)


def test_what_an_example_refuses():
    code, output = run(1, "14_pipeline.py")
    assert code == 1 and "Traceback" not in output
    assert "14_pipeline: a mesh of -1 x 2 x 2 does not fit the 1 ranks of this job" in output


@pytest.mark.parametrize(("ranks", "switched"), [(2, 7680), (4, 5760)])
@pytest.mark.parametrize("wrong", [False, True])
def test_axial_attention_over_ranks(ranks, switched, wrong):
    words = ["--wrong"] if wrong else []
    code, output = run(ranks, "15_axial_attention.py", "--check", "--steps", 2, *words)
    assert code == 0 and apart(output, "results") == 0, output
    assert apart(output, "gradients") > 0.1 if wrong else apart(output, "gradients") < 5e-6, output
    ((counted, expected),) = re.findall(r"counted (\d+), expected (\d+)", output)
    assert counted == expected and f"4 switches move {switched} bytes off each rank" in output


@pytest.mark.parametrize(
    ("ranks", "flags", "hidden", "through"), [(4, (), 40, 33_840), (2, ("--plane", "p2p"), 4000, 496_040)]
)
def test_data_parallel_over_ranks(ranks, flags, hidden, through):
    code, output = run(ranks, "16_data_parallel.py", "--hidden", hidden, flags=flags)
    assert code == 0 and "weights differ by 0.0e+00 after 5 steps" in output, output
    if not flags:
        assert f": {through:,}\n" in output and "rank 0 sends 7,500 bytes a step and receives 7,500" in output, output
    else:
        (counts,) = re.findall(r"Optimizer: through the streams of rank 0 went (\S+) and (\S+)", output)
        assert all(through <= int(count.replace(",", "")) < through * 1.01 for count in counts), output


@as_ranks(8)
def test_the_order_of_ranks_on_a_mesh():
    """tp is innermost, then pp, then dp. Megatron's order is another by default: tp, dp, pp."""
    mesh = hvd.Mesh(dp=2, pp=2, tp=2)
    assert {axis: [tuple(each.ranks) for each in mesh.sets(axis)] for axis in mesh.shape} == {
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "pp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }


@pytest.mark.parametrize("ranks", [3, *everything(1, 2)])
def test_gradients_through_calls_are_those_of_one_process(ranks):
    code, output = run(ranks, "17_distributed_autograd.py", "--check")
    assert code == 0 and "of 20 steps equal one process bit for bit: True" in output, output
    assert "owners still keep: 0" in output, output
