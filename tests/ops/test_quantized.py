"""Sums in 8 and 4 bits between hosts: how many bytes, how exact, the same on all ranks, and whole when something fails.

What the kernels do to one block is tested in C (test_kernel_quantize.c). Here ranks of one machine pretend to be on
several hosts.
"""

import zlib

import numpy as np
import pytest
from exchanges import exchange, given, lay_on, summed
from ranks import as_ranks

import hvdlite as hvd
from hvdlite._core import ffi, lib
from hvdlite.ops.quantized_sum import BLOCK

MOST = {8: 127, 4: 7}


def bytes_out():
    return sum(link["bytes_out"] for link in hvd.link_stats().values())


def greatest(array):
    """Of each block, in its elements' places."""
    padded = np.zeros(-(-array.size // BLOCK) * BLOCK, array.dtype)
    padded[: array.size] = np.abs(array)
    return np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: array.size]


def everywhere(value):
    """All ranks have this."""
    return all(each == value for each in hvd.allgather_object(value))


@as_ranks(2, 3, 4)
def test_fewer_bytes_the_same_bits_and_an_error_within_the_bound():
    n = hvd.size()
    lay_on(*[1] * n, plane="p2p")
    mine = given(1)
    exact = [hvd.allreduce(each.astype(np.float64), op=hvd.Sum) for each in mine]
    most = [hvd.allreduce(greatest(each), op=hvd.Max) for each in mine]
    hvd.barrier()
    before = bytes_out()
    hvd.allreduce(np.concatenate(mine), op=hvd.Sum)
    plain, results = bytes_out() - before, {}
    for bits, bar in ((8, 3.92), (4, 7.70)):
        before = bytes_out()
        results[bits] = summed(bits, [each.copy() for each in mine], f"bytes.{bits}")
        ratio = plain / (bytes_out() - before)
        assert ratio > bar, f"int{bits} on {n} ranks: {ratio:.3f} times fewer bytes"
        assert everywhere([zlib.crc32(each) for each in results[bits]])
        for got, due, high in zip(results[bits], exact, most):
            top = greatest(due) + (n - 1) * high / (2 * MOST[bits])
            bound = ((n - 1) * high + top) / (2 * MOST[bits]) + n * 2.0**-22 * (n * high + top)
            assert (np.abs(got - due) <= bound).all()
    lay_on(*[1] * n)  # another plane, whichever is for hosts
    for bits, result in results.items():
        assert all(np.array_equal(a, b) for a, b in zip(summed(bits, [e.copy() for e in mine], "again"), result))


@pytest.mark.parametrize("hosts", [(1, 1, 1, 1), (2, 2), (1, 3)], ids=str)
@as_ranks(4)
def test_nothing_is_lost_for_good_over_many_steps(hosts):
    """What all ranks gave, less what they still keep, is what they got, however tensors are bundled."""
    lay_on(*hosts, plane="p2p")
    sizes, bundles = (1000, 257, 5000, 64), (((0, 1, 2, 3),), ((2, 0), (3, 1)), ((1,), (3,), (0,), (2,)))
    kept = [np.zeros(size, np.float32) for size in sizes]
    total, got, magnitude = ([np.zeros(size) for size in sizes] for _ in range(3))
    for step in range(300):
        mine = given(step + 2, sizes)
        for i, each in enumerate(mine):
            total[i] += each
            magnitude[i] += np.abs(each)
        jobs = []
        for bundle in bundles[step % 3]:
            name, rest = f"kept.{step % 3}.{bundle}", [kept[i] for i in bundle]
            jobs.append(exchange(8 if step % 2 else 4, [mine[i] for i in bundle], name, rest).begin())
        for job in jobs:
            job.wait()
        for i, each in enumerate(mine):
            got[i] += each
    for i in range(4):
        due = hvd.allreduce(total[i] - kept[i], op=hvd.Sum)
        scale = hvd.allreduce(magnitude[i], op=hvd.Sum)
        assert (np.abs(due - got[i]) <= 1e-6 * scale).all()
        assert np.abs(kept[i]).max() > 0 or hvd.rank() not in {sum(hosts[:h]) for h in range(len(hosts))}


def in_one_process(bits, values):
    """What n ranks with these values would get."""
    n, count = values.shape
    results = np.zeros((n, count), np.float32)
    jobs, tensors, cut, wires = [], [], None, []
    for rank in range(n):
        tensor = ffi.new("struct hvd_quantized_tensor *")
        setattr(tensor, "from", ffi.cast("float *", values[rank].ctypes.data))
        tensor.to, tensor.count = ffi.cast("float *", results[rank].ctypes.data), count
        tensors.append(tensor)
        jobs.append(ffi.new("struct hvd_quantized *", [tensor, 1, bits, n, rank, 0, 1.0, 1.0, 0]))
        cut = [lib.hvd_quantized_first(jobs[rank], each) * (4 + bits * BLOCK // 8) for each in range(n + 1)]
        wire = ffi.new("unsigned char[]", cut[n])
        lib.hvd_quantized_encode(jobs[rank], wire)
        own = cut[rank + 1] - cut[rank]
        wires.append(bytes(ffi.buffer(wire)))
        wires[rank] = wires[rank][: cut[rank]] + bytes(own) + wires[rank][cut[rank] : cut[n] - own]
    sums = b""
    for rank, job in enumerate(jobs):
        part = slice(cut[rank], cut[rank + 1])
        came = b"".join(wire[part] for other, wire in enumerate(wires) if other != rank)
        mine = ffi.new("unsigned char[]", cut[rank + 1] - cut[rank])
        lib.hvd_quantized_sum(job, ffi.from_buffer(wires[rank]), ffi.from_buffer("unsigned char[]", came), mine)
        sums += bytes(ffi.buffer(mine))
    lib.hvd_quantized_decode(jobs[0], ffi.from_buffer("unsigned char[]", sums), 0)
    return results[0]


def rounded(values, most):
    scale = greatest(values) / most
    return np.rint(values / scale) * scale


@pytest.mark.parametrize(("n", "bar"), [(8, 0.75), (16, 0.55)])
@pytest.mark.parametrize("bits", MOST)
def test_one_hop_loses_less_than_a_ring_that_rounds_at_each(bits, n, bar):
    values = np.random.default_rng(3).standard_normal((n, 65_536)).astype(np.float32)
    exact = values.sum(axis=0, dtype=np.float64)
    ring = values[0].astype(np.float64)
    for each in values[1:]:
        ring = rounded(ring, MOST[bits]) + each
    error = np.sqrt(np.mean((in_one_process(bits, values) - exact) ** 2))
    assert error / np.sqrt(np.mean((rounded(ring, MOST[bits]) - exact) ** 2)) < bar


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@as_ranks(3)
def test_what_is_no_number_stays_in_its_block_on_all_ranks(odd):
    lay_on(1, 1, 1)
    for last in (0, 1, 2):
        array, kept = np.ones(1000, np.float32), np.full(1000, 0.25, np.float32)
        if hvd.rank() == last:
            array[300] = odd
        summed(8, [array], "odd", [kept])
        assert np.isnan(array[256:512]).all() and np.allclose(np.delete(array, range(256, 512)), 3.75)
        assert np.isfinite(kept).all() and np.abs(kept).max() <= 0.25
        assert (np.abs(summed(8, [np.ones(1000, np.float32)], "odd", [kept])[0] - 3) < 1).all()
