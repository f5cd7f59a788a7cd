"""Every example runs as the README says, on one rank and on several, and refuses files that are not what they claim.

The examples are programs, so they are run as programs, under a deadline, by the launcher a user would call.
"""

import gzip
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import Launch
from ranks import everything

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 240


def run(ranks, script, *arguments, flags=()):
    """(exit code, output) of an example on so many ranks; 0 ranks: without the launcher, which gets the flags."""
    command = [sys.executable, EXAMPLES / script, *arguments]
    if ranks:
        with Launch("-np", ranks, *flags, *command, merged=True) as job:
            return job.wait(SECONDS), job.out
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def accuracies(output):
    return [float(text) for text in re.findall(r"test accuracy (\d+\.\d+)%", output)]


@pytest.mark.parametrize("ranks", [2, *everything(0, 1, 3)])
def test_ranks_say_hello_and_meet(ranks):
    code, output = run(ranks, "01_hello_ranks.py")
    assert code == 0, output
    for rank in range(max(ranks, 1)):
        assert f"Hello from rank {rank} of {max(ranks, 1)}" in output
    assert output.count(f"All {max(ranks, 1)} ranks have met") == 1


@pytest.mark.parametrize("ranks", [0, *everything(1, 2, 4)])
def test_numpy_collectives_are_right(ranks):
    code, output = run(ranks, "02_allreduce_numpy.py")
    assert code == 0, output
    assert f"right on {max(ranks, 1)} rank" in output


@pytest.mark.parametrize("ranks", [2, *everything(0)])
def test_digits_are_learnt(ranks):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    code, output = run(ranks, "03_train_digits.py", *([] if ranks else ["--epochs", 5]))
    assert code == 0, output
    assert accuracies(output)[-1] >= (97.0 if ranks else 90.0), output
    assert output.count("epoch 15  " if ranks else "epoch  5  ") == 1, "rank 0 alone speaks"
    assert re.search(r"loss \d+\.\d{4}  test accuracy \S+  [\d,]+ samples/s", output)


def idx(array, kind=8, dimensions=None):
    header = struct.pack(">HBB", 0, kind, array.ndim if dimensions is None else dimensions)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def images_and_labels(count, seed):
    """Noisy images, 10 x 12 pixels, of three kinds of bars; any small network tells them apart."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = random.integers(0, 60, (count, 10, 12))
    for image, label in zip(images, labels):
        image[3 * label : 3 * label + 3] += 180
    return images, labels


@pytest.fixture()
def folder(tmp_path):
    """Four good IDX files, two of them gzipped."""
    train, test = images_and_labels(90, 1), images_and_labels(31, 2)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(train[0]))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(train[1])))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(test[0])))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(test[1]))
    return tmp_path


def test_idx_files_are_learnt(folder):
    pytest.importorskip("torch")
    code, output = run(2, "03_train_digits.py", "--data", folder, "--epochs", 10, "--batch-size", 8)
    assert code == 0, output
    assert accuracies(output)[-1] >= 97.0, output


IMAGES, LABELS = images_and_labels(6, 3)
BAD = {
    "no IDX file": ("train-images-idx3-ubyte", b"\x89PNG not at all"),
    "nothing": ("train-images-idx3-ubyte", b""),
    "type 0x0d, expected unsigned bytes": ("train-images-idx3-ubyte", idx(IMAGES, kind=13)),
    "has 1 dimensions, expected 3": ("train-images-idx3-ubyte", idx(LABELS)),
    "ends in its header": ("train-images-idx3-ubyte", idx(IMAGES)[:10]),
    "says 6 x 10 x 12 values but holds 719 bytes": ("train-images-idx3-ubyte", idx(IMAGES)[:-1]),
    "but holds 721 bytes": ("train-images-idx3-ubyte", idx(IMAGES) + b"x"),
    "has 90 images, ": ("train-labels-idx1-ubyte.gz", gzip.compress(idx(LABELS))),
    "holds no image": ("t10k-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES[:0]))),
    "cannot be read": ("t10k-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES))[:-20]),
    "Not a gzipped file": ("t10k-images-idx3-ubyte.gz", idx(IMAGES)),
    "has neither": ("t10k-images-idx3-ubyte.gz", None),
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_file_is_named(folder, text, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from idx import IdxError, read_pair

    name, content = BAD[text]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    if text == "holds no image":
        (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS[:0]))
    with pytest.raises(IdxError) as raised:
        for part in ("train", "test"):
            read_pair(folder, part)
    assert "idx" in str(raised.value) and text in str(raised.value)


def test_the_program_ends_with_the_name_of_the_bad_file(folder):
    pytest.importorskip("torch")
    (folder / "train-images-idx3-ubyte").write_bytes(b"\x89PNG not at all")
    code, output = run(2, "03_train_digits.py", "--data", folder)
    assert code == 1
    assert "train-images-idx3-ubyte: is no IDX file (it starts with 89504e47)" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("again", [False, *everything(True)])
def test_digits_are_learnt_while_a_rank_is_lost(tmp_path, again):
    """And from the file, by a job that is started again."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path, flags = tmp_path / "state", ("--min-np", "1")
    code, output = run(3, "13_elastic.py", "--epochs", 6, "--lose", 2, "--saved", path, flags=flags)
    assert code == 0 and accuracies(output)[-1] >= 90.0, output
    assert output.count("killed by SIGKILL") == 1 and "epoch  6  " in output and path.exists(), output
    if again:
        code, output = run(2, "13_elastic.py", "--epochs", 8, "--saved", path, flags=flags)
        assert code == 0 and "goes on from" in output and "epoch  8  2 ranks" in output, output
        assert "epoch  5  " not in output, output
