"""A save of a table is whole or not there, and what is damaged, foreign or hostile is refused by name.

Everything here is files in one process. A crash is played by stopping between two calls: what lies on the disk then is
what a killed server or rank leaves behind.
"""

import json
import os

import numpy as np
import pytest

from hvdlite.ps import checkpoint_files, checkpoint_pieces

ABOUT = {"rows": 1000, "dim": 3, "rule": "Adam", "seed": 1}
ASKED = (1000, 3, "Adam")


ALL = np.ones(10, bool)


def saved(folder, seed=0, index=True):
    random, listed, content = np.random.default_rng(seed), [], []
    os.makedirs(folder, exist_ok=True)
    for server, ids in enumerate(np.split(random.permutation(1000), [400, 1000])):
        ids = ids[np.argsort(ids % 10, kind="stable")]
        rows = random.standard_normal((len(ids), 11)).astype(np.float32)
        listed.append(checkpoint_pieces.write_piece(folder, f"{seed:08x}-{server}-0.npz", ids, rows, ids % 10))
        content.append((ids, rows))
    if index:
        checkpoint_files.write_index(folder, ABOUT, listed)
    return content


def loaded(folder):
    about, listed = checkpoint_files.read_index(folder, *ASKED)
    assert about == ABOUT
    return [whole(folder, piece) for piece in listed]


def whole(folder, piece):
    came = list(checkpoint_pieces.read_piece(folder, piece, ALL))
    return came[0] if came else (np.zeros(0, np.int64), np.zeros((0, 11), np.float32))


def same(one, other):
    return all(np.array_equal(a, b) for x, y in zip(one, other) for a, b in zip(x, y)) and len(one) == len(other)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "deep" / "users")


def refused(folder, *words, asked=ASKED):
    with pytest.raises(ValueError, match=r"\[HVD034\]$") as caught:
        for piece in checkpoint_files.read_index(folder, *asked)[1]:
            whole(folder, piece)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_was_saved_is_loaded(folder):
    content = saved(folder)
    assert same(loaded(folder), content) and len(content[-1][0]) == 0  # a server may have no rows


def test_a_new_save_replaces_the_old_one_when_it_is_whole_and_not_before(folder, tmp_path):
    refused(folder, "index.json", "no save")
    saved(folder, 1, index=False)
    refused(folder, "index.json", "not whole")
    old = saved(folder, 2)
    saved(folder, 3, index=False)
    assert same(loaded(folder), old)
    (tmp_path / "deep" / "users" / "notes.npz").write_text("the user's own")
    new = saved(folder, 4)
    assert same(loaded(folder), new) and len(os.listdir(folder)) == len(new) + 2


@pytest.mark.parametrize("asked", [(999, 3, "Adam"), (1000, 4, "Adam"), (1000, 3, "Sgd")])
def test_a_save_of_another_table_is_refused_with_both_values(folder, asked):
    saved(folder)
    ours, theirs = next(pair for pair in zip(asked, ASKED) if pair[0] != pair[1])
    refused(folder, "index.json", repr(ours), repr(theirs), asked=asked)


def test_damaged_pieces_are_refused(folder):
    content = saved(folder)
    piece = checkpoint_files.read_index(folder, *ASKED)[1][0]
    path = os.path.join(folder, piece["file"])
    data = open(path, "rb").read()
    for place in range(0, len(data), 499):  # a byte of the arrays, or of what lies around them
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ 0x40]))
        try:
            assert same([whole(folder, piece)], content[:1])  # padding, a date
        except ValueError as error:
            assert path in str(error) and str(error).endswith("[HVD034]")
        open(path, "wb").write(data)
    open(path, "ab").write(b"x")
    refused(folder, path, f"{len(data) + 1:,}", f"{len(data):,}")
    os.remove(path)
    refused(folder, path)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../users/5f0c9a31-0-0.npz"}, {"file": "5f0c9a31-0-0.npz\n"}, {"file": "/etc/passwd"}, {"file": 7},
        {"rows": 399}, {"width": 3}, {"last": 1000}, {"last": 17}, {"bytes": -1}, {"rows": 400.0}, {"bytes": True},
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused(folder, change):
    saved(folder)
    path = os.path.join(folder, "index.json")
    index = json.load(open(path))
    index["pieces"][0].update(change)
    json.dump(index, open(path, "w"))
    refused(folder, folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"format": 3, "about": {}, "pieces": []}', "\0", '{"format": 1}', "é"]
)
def test_what_is_no_index_is_refused(folder, text):
    saved(folder)
    open(os.path.join(folder, "index.json"), "w", encoding="latin-1").write(text)
    refused(folder, "index.json")


def test_pickles_and_packed_pieces_are_not_read(folder):
    ids, rows = saved(folder)[0]
    piece = checkpoint_files.read_index(folder, *ASKED)[1][0]
    path = os.path.join(folder, piece["file"])
    for write in (
        lambda: np.savez(path, ids=ids, rows=np.array([{}] * len(ids), object)),
        lambda: np.savez_compressed(path, ids=ids, rows=np.zeros_like(rows)),
        lambda: np.savez(path, ids=ids, rows=rows.astype(">f4")),
        lambda: np.savez(path, ids=-ids, rows=rows),
    ):
        write()
        with pytest.raises(ValueError, match="HVD034"):
            whole(folder, {**piece, "bytes": os.path.getsize(path)})


def test_a_reader_takes_the_parts_that_it_wants_and_reads_no_others(folder, monkeypatch):
    ids, rows = saved(folder)[0]
    piece, wanted, read = checkpoint_files.read_index(folder, *ASKED)[1][0], ALL.copy(), []
    wanted[[0, 3, 4, 9]] = False
    through = checkpoint_pieces._read
    monkeypatch.setattr(
        checkpoint_pieces,
        "_read",
        lambda file, at, begin, end: read.append(end - begin) or through(file, at, begin, end),
    )
    came = list(checkpoint_pieces.read_piece(folder, piece, wanted))
    mine = wanted[ids % 10]
    assert same([[np.concatenate(each) for each in zip(*came)]], [(ids[mine], rows[mine])])
    assert len(came) == 2 and sum(read) == 10 + 2 * mine.sum()


def test_a_part_with_a_number_that_is_not_its_own_is_refused(folder):
    ids, rows = saved(folder)[0]
    piece = checkpoint_files.read_index(folder, *ASKED)[1][0]
    path = os.path.join(folder, piece["file"])
    with np.load(path) as arrays:
        parts = arrays["parts"]
    parts[[0, 1], 0] = parts[[1, 0], 0]
    np.savez(path, ids=ids, rows=rows, parts=parts)
    refused(folder, path, "checksum of part")


def test_a_save_of_format_1_is_read(folder):
    ids, rows = saved(folder)[0]
    piece = checkpoint_files.read_index(folder, *ASKED)[1][0]
    path = os.path.join(folder, piece["file"])
    np.savez(path, ids=ids, rows=rows)
    piece["bytes"] = os.path.getsize(path)
    assert same([whole(folder, piece)], [(ids, rows)])
    data = bytearray(open(path, "rb").read())
    data[len(data) // 2] ^= 1
    open(path, "wb").write(data)
    with pytest.raises(ValueError, match="the checksum of rows.npy differs"):
        whole(folder, piece)
