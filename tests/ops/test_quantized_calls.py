"""compression=hvd.Compression.int8 of single calls: dtypes, layouts, groups, sets and names, of NumPy and of torch."""

import numpy as np
import pytest
import torch
from exchanges import lay_on
from ranks import as_ranks

import hvdlite.numpy as hvdn
import hvdlite.torch as hvdt

KINDS = {"numpy": hvdn, "torch": hvdt}


def array(kind, values, dtype="float32"):
    return np.asarray(values, dtype) if kind == "numpy" else torch.tensor(values, dtype=getattr(torch, dtype))


def numbers(result):
    return result.float().numpy() if isinstance(result, torch.Tensor) else np.asarray(result, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@as_ranks(3)
def test_every_form_of_a_single_call(kind):
    lay_on(1, 1, 1)
    hvd, me = KINDS[kind], KINDS[kind].rank()
    int8, int4 = hvd.Compression.int8, hvd.Compression.int4
    line = np.linspace(-1, 1, 600, dtype=np.float32)
    mine = line * (me + 1)
    for dtype in ("float32", "float16", *(("bfloat16",) if kind == "torch" else ())):
        for compression, off in ((int8, 0.03), (int4, 0.6)):
            tensor = array(kind, mine.tolist(), dtype)
            result = hvd.allreduce(tensor, op=hvd.Sum, compression=compression)
            assert result.dtype == tensor.dtype and np.abs(numbers(result) - 6 * line).max() < 6 * off
            assert np.array_equal(numbers(tensor), numbers(array(kind, mine.tolist(), dtype)))
    turned = array(kind, mine.reshape(20, 30).tolist()).T
    result = hvd.allreduce(turned, compression=int8)
    assert tuple(result.shape) == (30, 20) and np.abs(numbers(result) - 2 * line.reshape(20, 30).T).max() < 0.06
    group = hvd.grouped_allreduce(
        [array(kind, mine.tolist()), array(kind, []), array(kind, 2.0)], compression=int8,
        op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0,
    )  # fmt: skip
    assert np.abs(numbers(group[0]) - 12 * line).max() < 0.4 and group[1].shape[0] == 0 and abs(group[2] - 12) < 0.1
    pair = hvd.add_process_set([0, 2])
    if me != 1:
        assert np.abs(numbers(hvd.allreduce(turned, compression=int4, process_set=pair)) / 2).max() < 1.2
    hvd.barrier()
    kept, total = int4(feedback=True), np.zeros(600, np.float32)
    for _ in range(20):
        total += numbers(hvd.allreduce(array(kind, mine.tolist()), compression=kept, name="kept"))
    assert np.abs(total / 20 - 2 * line).max() < 0.05  # one call alone is off by ten times as much
    hvd.remove_process_set(pair)


@pytest.mark.parametrize("kind", KINDS)
@as_ranks(2)
def test_what_is_refused_before_anything_is_sent(kind):
    lay_on(1, 1)
    hvd = KINDS[kind]
    int8, ones = hvd.Compression.int8, array(kind, [1.0, 2.0])
    for more, words in (
        ({"op": hvd.Max}, "needs op=hvd.Average or hvd.Sum"),
        ({"compression": int8(feedback=True)}, "give name="),
        ({"tensor": array(kind, [1, 2], "int64")}, "not int64"),
        ({"tensor": array(kind, [1.0], "float64")}, "not float64"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            hvd.allreduce(**{"tensor": ones, "compression": int8, **more})
        assert "HVD208" in str(caught.value)
    for options in ({"least_bytes": -1}, {"bucket_mb": 0}, {"least_bytes": True}):
        with pytest.raises(ValueError, match="HVD208"):
            int8(**options)
    assert numbers(hvd.allreduce(ones, compression=int8)) == pytest.approx([1.0, 2.0], abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
@as_ranks(3)
def test_on_one_host_nothing_is_rounded(kind):
    lay_on(3)
    hvd = KINDS[kind]
    mine = array(kind, (np.random.default_rng(hvd.rank()).standard_normal(3000)).tolist())
    plain = hvd.allreduce(mine, op=hvd.Sum)
    assert (hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.int4) == plain).all()
    assert (hvd.grouped_allreduce([mine], op=hvd.Sum, compression=hvd.Compression.int8)[0] == plain).all()
