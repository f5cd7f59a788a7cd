"""The training examples do what they promise: resume to the same bits, learn the same on any number of ranks, compete.

Each runs as a program under the launcher, with sizes that end in seconds.
"""

import re
from pathlib import Path

import pytest
from ranks import everything
from test_examples import EXAMPLES, accuracies, run

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Also for jobs of one rank: other tests run beside."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def numbers(output, what):
    """The numbers after a word, in the order they were printed."""
    return [float(text) for text in re.findall(rf"\b{what} (-?\d+\.\d+)", output)]


RESNET = ("04_train_resnet.py", "--width", 8, "--samples", 128, "--batch-size", 8, "--epochs", 3)


def test_a_resnet_that_was_stopped_and_resumed_ends_with_the_same_bits(tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    code, output = run(2, *RESNET, "--checkpoint", whole)
    assert code == 0, output
    losses = numbers(output, "loss")[::2]  # each line has a training and a test loss
    assert len(losses) == 3 and losses[-1] < losses[0], output

    code, first = run(2, *RESNET, "--checkpoint", parts, "--stop-after", 1)
    assert code == 0 and first.count("epoch ") == 1, first
    code, second = run(2, *RESNET, "--checkpoint", parts)
    assert code == 0, second
    assert second.count(f"resumed from {parts} after epoch 1") == 1, "rank 0 alone reads"
    assert numbers(second, "loss") == numbers(output, "loss")[2:]

    one, other = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert one["epochs"] == other["epochs"] == 3
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    for number, state in one["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], other["optimizer"]["state"][number]["momentum_buffer"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"], "nothing half written is left"


def test_a_bottleneck_resnet_runs(tmp_path):
    code, output = run(2, *RESNET[:-1], 1, "--depth", 50, "--samples", 32, "--checkpoint", tmp_path / "r50.pt")
    assert code == 0, output
    model = torch.load(tmp_path / "r50.pt", weights_only=True)["model"]
    assert sum("conv" in n or t.dim() == 4 for n, t in model.items()) == 1 + 16 * 3 + 4, "convolutions of ResNet-50"


WRITER = ("05_language_model.py", "--width", 32, "--heads", 2, "--layers", 1, "--characters", 60_000, "--write", 40)


def test_a_language_model_learns_the_same_on_one_rank_and_on_two():
    """Only if the averaged gradient was clipped: --clip is so small that every step is."""
    settings = (*WRITER, "--amp", "none", "--steps", 20, "--every", 10, "--clip", 0.1)
    outputs = []
    for ranks, passes in ((1, 4), (2, 2)):
        code, output = run(ranks, *settings, "--accumulate", passes)
        assert code == 0, output
        outputs.append(output)
    one, two = (numbers(output, "gradient") for output in outputs)
    assert one == pytest.approx(two, abs=0.002) and min(one) > 0.1, outputs
    one, two = (numbers(output, "loss") for output in outputs)
    assert len(one) == 2 and one[1] < one[0] - 0.2
    # one rank prints the mean of its 4 batches, two ranks that of both sums of 2: the same batches
    assert one == pytest.approx(two, abs=0.003), outputs


@pytest.mark.parametrize("half", ["float16", *everything("bfloat16")])
def test_a_language_model_learns_in_mixed_precision(half):
    code, output = run(2, *WRITER, "--amp", half, "--steps", 30, "--every", 10)
    assert code == 0, output
    losses = numbers(output, "loss")
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5, output
    assert "def " in output, "it writes"


def test_a_text_that_is_too_short_is_named(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    code, output = run(2, *WRITER, "--text", tmp_path / "short.txt")
    assert code == 1
    assert "short.txt is too short a text for --length 64" in output and "Traceback" not in output


def test_a_gan_learns_to_draw():
    """The example itself compares the networks of all ranks when it has ended."""
    pytest.importorskip("sklearn")
    code, output = run(2, "06_gan_digits.py", "--epochs", 12)
    assert code == 0, output
    distances = numbers(output, "distance")
    assert distances[-1] < 1.7 < distances[0], output
    assert output.count("##") > 20, "it shows what it draws"


@pytest.mark.parametrize("dp, tp", [(2, 2), *everything((1, 2), (3, 1))])
def test_a_mesh_trains_as_one_process_does(dp, tp):
    pytest.importorskip("sklearn")
    shape = ("--dp", dp, "--tp", tp, "--batch-size", 48)
    code, output = run(dp * tp, "07_mesh.py", *shape, "--hidden", 32, "--epochs", 3, "--check")
    assert code == 0, output
    assert all(
        f"rank {rank}: dp {rank // tp}, tp {rank % tp}, share {rank % tp} of {tp}" in output for rank in range(dp * tp)
    )
    losses = numbers(output, "loss")
    assert losses[-1] < losses[0] / 2, output
    (apart,) = re.findall(r"weights differ from those of one process by (\S+) at most", output)
    assert float(apart) < 2e-5, output


def test_a_mesh_says_how_many_ranks_it_needs():
    pytest.importorskip("sklearn")
    code, output = run(2, "07_mesh.py")
    assert code == 1 and "Traceback" not in output
    assert "a mesh of 2 x 2 needs 4 ranks, and this job has 2: start it with hvdlite-run -np 4" in output


def test_ddp_learns_the_same_over_hvdlite_and_over_gloo():
    pytest.importorskip("sklearn")
    outputs = [run(2, "11_ddp_backend.py", *words) for words in ((), ("gloo",))]
    assert [code for code, _ in outputs] == [0, 0], outputs
    ours, gloos = (numbers(output, "loss") for _, output in outputs)
    assert ours == gloos and len(ours) == 12, outputs
    assert accuracies(outputs[0][1])[-1] > 94, outputs


def test_a_sharded_model_learns_on_after_it_was_saved_and_loaded(tmp_path):
    code, output = run(2, "12_fsdp2.py", tmp_path)
    assert code == 0, output
    losses = numbers(output, "loss")
    assert len(losses) == 6 and losses[3] < losses[1] < losses[0] - 0.3 and losses[5] < losses[2], output
    assert {"__0_0.distcp", "__1_0.distcp"} < {path.name for path in tmp_path.iterdir()}, "each rank writes its shard"


@pytest.mark.parametrize("flag", ["--limit=3", *everything("--replicated")])
def test_a_language_model_fits_only_with_a_sharded_optimizer(tmp_path, flag):
    sizes = "--width", 384, "--layers", 2, "--steps", 5
    code, output = run(4, "25_sharded_optimizer.py", *sizes, "--checkpoint", tmp_path / "saved", flag)
    if flag == "--replicated":
        assert code != 0 and "can't allocate memory" in output, output
    else:
        assert code == 0 and numbers(output, "loss") and len(list((tmp_path / "saved").glob("share-*"))) == 4, output


def test_one_model_in_each_style_has_the_same_bits():
    pytest.importorskip("sklearn")
    code, output = run(2, "27_three_styles.py")
    assert code == 0 and output.count("on all ranks: True") == 3, output
    assert len(set(re.findall(r": (\w{12}),", output))) == 1, output


@pytest.mark.parametrize("form, ratio", [("int4", 0.14), *everything(("int8", 0.27), ("power", 0.2), ("fp16", 0.51))])
def test_compressed_gradients_take_fewer_bytes_between_hosts(form, ratio):
    apart = Path(__file__).resolve().parents[1] / "support/pretended_hosts.py"
    words = 1, EXAMPLES / "26_compressed_gradients.py", "--width", 512, "--seconds", 0.2, "--start-after", 0
    code, output = run(2, apart, *words, "--compression", form, "--every", 10)
    assert code == 0, output
    losses, sent = numbers(output, "loss"), [float(each) for each in re.findall(r"([\d.]+) MB sent", output)]
    full = 4e-6 * (256 * 48 + 768 * 512 + 512 * 512 + 512 * 256)
    steps = int(re.findall(r"step +(\d+):", output)[-1])
    assert losses[-1] < losses[0] - 1.5 and steps >= 10, output
    assert sent[-1] * steps < full * (ratio * (steps - 2) + 2.1), output  # the first round travels as it is


@pytest.mark.parametrize("ranks", [2, *everything(0, 4)])
def test_a_pipeline_has_the_stages_that_its_memory_needs(ranks):
    pytest.importorskip("sklearn")
    limit = ("--memory", "2MB") if ranks else ()
    code, output = run(ranks, "28_elastic_pipeline.py", "--steps", 50, *limit, flags=("--min-np", 1))
    stages = {0: "1 stage x 1 copy", 2: "2 stages x 1 copy"}.get(ranks, "stages x")
    assert code == 0 and stages in output and accuracies(output)[-1] >= 90.0, output
    assert numbers(output, "loss")[-1] < 0.5 and output.count("is process") == max(ranks, 1), output


@pytest.mark.parametrize("kind", ["pool", *everything("hashed")])
def test_digits_are_learnt_through_an_aggregator(kind):
    pytest.importorskip("sklearn")
    flags = ("--aggregators", 1, "--aggregator-kind", kind)
    code, output = run(2, "29_aggregator.py", flags=flags)
    assert code == 0 and accuracies(output)[-1] >= 90.0, output
    assert output.count("'lost': '', 'operations': {'aggregator': 150}") == 1, output


def test_an_example_without_its_aggregator_says_how_to_start_one():
    pytest.importorskip("sklearn")
    code, output = run(2, "29_aggregator.py")
    assert code == 1 and "start it with hvdlite-run --aggregators 1" in output, output


@pytest.mark.parametrize("flags", [("--fragments", 4, "--delay", 3), *everything((), ("--bits", 4))])
def test_islands_with_local_steps_learn_digits(flags):
    pytest.importorskip("sklearn")
    code, output = run(4, "30_local_steps.py", *flags)
    assert code == 0 and accuracies(output)[-1] >= 90.0, output
