"""check_consistency on arrays, on PyTorch's rarer tensors, and that all adapters say the same: one comparison.

Each difference is made on one rank; all ranks must hear of it, in the same words, and go on afterwards.
"""

from array import array
from importlib.util import find_spec
from random import Random
from threading import Lock

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd

NAN = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)  # two of many


def told(check, *says):
    """The error of all ranks, which must be one."""
    with pytest.raises(hvd.HvdMismatchError) as error:
        check()
    text = str(error.value)
    assert len(set(hvd.allgather_object(text))) == 1
    for each in says:
        assert each in text, text
    return text


@as_ranks(1, 3)
def test_arrays_are_compared_by_their_bits():
    rank, several = hvd.rank(), hvd.size() > 1
    odd = rank == hvd.size() - 1 and several

    def arrays():
        return {
            "w": np.arange(6.0).reshape(2, 3),
            "zero": np.zeros(2, np.float32),
            "nan": NAN[:1].copy(),
            "none": None,
            "texts": np.array(["a", None], object),
            "nested": {"lr": 0.1, "list": [np.int64(3), "momentum"]},
            "empty": np.zeros((0, 4)),
            "long": np.ones(2, np.longdouble),
            "masked": np.ma.masked_array([1, 2], [False, True]),
        }

    hvd.check_consistency(arrays())
    hvd.check_consistency([np.asfortranarray(np.ones((2, 2))), 1.5])
    hvd.check_consistency(np.float32(rank * 0))
    hvd.check_consistency([("a", np.ones(1)), ("b", None)])

    def changed(name, value):
        made = arrays()
        made[name] = value if odd else made[name]
        return lambda: hvd.check_consistency(made)

    if not several:
        return
    told(changed("w", np.arange(6.0).reshape(2, 3) + 1e-12), "'w' on rank 2 is not what rank 0 has")
    told(changed("zero", np.array([0.0, -0.0], np.float32)), "'zero' on rank 2")
    told(changed("nan", NAN[1:]), "'nan' on rank 2")
    told(changed("none", 0), "'none' on rank 2")
    told(changed("none", np.zeros(1)), "differ: rank 0 has none; rank 2 has none [1] float64")
    told(changed("texts", np.array(["b", None], object)), "'texts' on rank 2")
    told(changed("nested", {"lr": 0.2, "list": [np.int64(4), "momentum"]}), "'nested.lr' on rank 2", "first of 2")
    told(changed("empty", np.zeros((0, 5))), "rank 0 has empty [0, 4] float64; rank 2 has empty [0, 5] float64")
    told(changed("w", np.arange(6.0, dtype=np.float32).reshape(2, 3)), "[2, 3] float64; rank 2 has w [2, 3] float32")
    told(changed("masked", np.ma.masked_array([1, 2], [True, False])), "'masked' on rank 2")
    told(lambda: hvd.check_consistency([np.ones(1)] * (2 + odd)), "rank 2 has 2 [1] float64. Build the same")
    order = [("a", np.ones(1)), ("b", np.zeros(1))][:: 1 - 2 * odd]
    told(lambda: hvd.check_consistency(order), "the ranks [0, 1, 2] have the same tensors in different orders")
    told(lambda: hvd.check_consistency([np.array([rank])]), "'0' on ranks 1, 2 is not what rank 0 has")
    members = hvd.add_process_set([0, 2])
    if members.included():
        told_there = pytest.raises(hvd.HvdMismatchError, match="'0' on rank 2 is not what rank 0 has")
        with told_there:
            hvd.check_consistency([np.array([rank])], members)
    hvd.remove_process_set(members)
    hvd.check_consistency(arrays())


@as_ranks(1)
def test_what_cannot_be_compared_is_refused():
    for wrong in ("text", object(), None, b"bytes"):
        with pytest.raises(ValueError, match="expected a dict or a list of tensors, not "):
            hvd.check_consistency(wrong)
    with pytest.raises(ValueError, match="these names are not unique: a"):
        hvd.check_consistency([("a", np.ones(1)), ("a", np.ones(1))])
    hvd.shutdown()
    with pytest.raises(hvd.HvdNotInitializedError):
        hvd.check_consistency([np.ones(1)])


@as_ranks(3)
def test_what_one_rank_cannot_compare_all_hear_of():
    odd = hvd.rank() == 1
    for wrong, text in (("text", "expected a dict or a list of tensors, not str"), ([("a", 1)] * 2, "not unique: a")):
        with pytest.raises(ValueError, match=text) as error:
            hvd.check_consistency(wrong if odd else [np.ones(2)])
        assert str(error.value).startswith("check_consistency: " if odd else "rank 1: check_consistency: ")
    members = hvd.add_process_set([1, 2])
    if members.included():
        with pytest.raises(ValueError, match="rank 1" if not odd else "not str"):
            hvd.check_consistency("text" if odd else [np.ones(1)], members)
    hvd.remove_process_set(members)
    if find_spec("torch") is not None:
        import torch

        import hvdlite.torch as hvdt

        with pytest.raises(ValueError, match="'0' is a meta tensor"):
            hvdt.check_consistency([torch.ones(1, device="meta" if odd else "cpu")])
        hvdt.check_consistency([torch.ones(1)])
    hvd.check_consistency([np.ones(1)])


@as_ranks(3)
def test_a_rank_that_is_in_another_exchange_is_waited_for_by_name():
    """Unnamed, the two would have met, and died of what they did not understand."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    import hvdlite.torch as hvdt
    from hvdlite._core import byte_exchange
    from hvdlite.training.consistency import require_equal

    names = []
    submit = byte_exchange.submit

    def noted(kind, set_number, dtype, name, *rest, **more):
        names.append(name)
        return submit(kind, set_number, dtype, name, *rest, **more)

    byte_exchange.submit = noted
    try:
        hvdt.check_consistency([torch.ones(1)])
        require_equal("broadcast_parameters", ["a"], hvd.global_process_set, str, "")
    finally:
        byte_exchange.submit = submit
    assert [name for name in names if name and "allgather_object" in name] == [
        "allgather_object.check_consistency", "allgather_object.broadcast_parameters"
    ]  # fmt: skip


@as_ranks(3)
def test_tensors_of_every_kind():
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    import hvdlite.torch as hvdt

    odd = hvd.rank() == 1

    def sparse(values, places=((0, 2),)):
        return torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(values), (4,))

    def tensors():
        return {
            "none": None,
            "sparse": sparse([1.0, 2.0]),
            "complex": torch.tensor([1 + 2j]).conj(),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "zero": torch.zeros(1),
            "turned": torch.arange(6.0).view(2, 3).T,
        }

    def changed(name, value):
        made = tensors()
        made[name] = value if odd else made[name]
        return lambda: hvdt.check_consistency(made)

    hvdt.check_consistency(tensors())
    same_otherwise = sparse([2.0, 0.5, 0.5], ((2, 0, 0),)) if odd else sparse([1.0, 2.0])
    hvdt.check_consistency([same_otherwise, None, torch.ones(1).squeeze()])
    hvdt.check_consistency(torch.ones(1))
    told(changed("sparse", sparse([1.0, 3.0])), "'sparse' on rank 1 is not what rank 0 has")
    told(changed("sparse", sparse([1.0, 2.0], ((0, 3),))), "'sparse' on rank 1")
    told(changed("sparse", torch.tensor([1.0, 0, 2, 0])), "sparse [4] float32 sparse; rank 1 has sparse [4] float32")
    told(changed("complex", torch.tensor([1 + 2j])), "'complex' on rank 1")
    told(changed("zero", -torch.zeros(1)), "'zero' on rank 1")
    told(changed("none", torch.ones(1)), "rank 1 has none [1] float32")
    with pytest.raises(ValueError, match="'0' is a meta tensor"):
        hvdt.check_consistency([torch.ones(1, device="meta")])


def parted(check, given, *says):
    told(lambda: check(given), *says)


def adapters():
    """check_consistency of every adapter that is here and quickly imported."""
    yield hvd.check_consistency
    if find_spec("torch") is not None:
        import hvdlite.torch as hvdt

        yield hvdt.check_consistency


@as_ranks(2)
def test_arrays_and_bytes_are_the_same_in_every_adapter():
    odd = hvd.rank() == 1
    long = np.zeros(5000, np.float32)
    long[2500] = odd
    gaps = np.zeros(1, np.dtype([("small", "i1"), ("large", "f8")], align=True))
    gaps.view(np.uint8)[1] = odd  # lies between the two fields and means nothing
    for check in adapters():
        parted(check, {"a": long}, "'a' on rank 1 is not what rank 0 has")
        parted(check, {"a": [np.array([0.1 + 1e-12 * odd])]}, "'a.0' on rank 1")
        parted(check, {"a": np.float32(odd)}, "'a' on rank 1")
        parted(check, {"a": np.zeros(2 + odd)}, "rank 0 has a [2] float64; rank 1 has a [3] float64")
        parted(check, {"a": np.zeros(2, ">f4" if odd else "<f4")}, "[2] float32; rank 1 has a [2] >f4")
        parted(check, {"a": bytes([odd])}, "'a' on rank 1")
        parted(check, {"a": bytearray(1 + odd)}, "a [1] bytearray B; rank 1 has a [2] bytearray B")
        parted(check, {"a": memoryview(np.arange(4)[:: 2 - odd][:2])}, "'a' on rank 1")
        parted(check, {"a": array("d", [0.1 + 1e-12 * odd])}, "'a' on rank 1")
        check({"a": gaps, "b": b"x", "c": np.array([NAN, {"s"}, None], object), "d": array("u", "x")})


@as_ranks(2)
def test_tensors_of_another_framework_are_read_or_refused_by_name():
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    odd = hvd.rank() == 1
    parameter = torch.nn.Parameter(torch.zeros(5000))
    hvd.check_consistency({"w": parameter})
    with torch.no_grad():
        parameter[2500] = odd
    parted(hvd.check_consistency, {"w": parameter}, "'w' on rank 1 is not what rank 0 has")
    with pytest.raises(ValueError, match="the ranks' set objects show alike but are pickled differently"):
        hvd.check_consistency({"w": {(parameter,)}})
    half = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'w' cannot be compared: NumPy cannot read this Tensor: .*\[HVD237\]$"):
        hvd.check_consistency({"w": half})

    class Variable:  # as TensorFlow's and Keras's are: they lend an array, and show a few values
        dtype, shape, assign = "float32", (5000,), None
        drift = odd

        def __array__(self, dtype=None, copy=None):
            return np.append(np.zeros(4999), self.drift)

    for check in adapters():
        parted(check, {"w": Variable()}, "'w' on rank 1 is not what rank 0 has")


class Shown:
    """Some object: it shows what it is told to, and is pickled with what else it has."""

    def __init__(self, shown, **more):
        self.__dict__.update(more, shown=shown)

    def __repr__(self):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown


@as_ranks(2)
def test_whatever_is_raised_on_one_rank_all_hear_of():
    odd = hvd.rank() == 1
    mute = type("Mute", (Exception,), {"__str__": None})
    cycle = {"a": [1]}
    cycle["a"].append(cycle)
    wrong = (
        (Shown(RuntimeError("boom")), RuntimeError, "boom", "'x' cannot be compared: RuntimeError: boom"),
        (Shown(KeyError("k")), KeyError, "k", "'x' cannot be compared: KeyError: 'k'"),
        (Shown(mute("")), mute, None, "'x' cannot be compared: Mute: which has no text"),
        (cycle, ValueError, "'x.a.1' cannot be compared", "'x.a.1' cannot be compared: it is the dict that it lies"),
        (memoryview(np.array([1], object)), ValueError, "memoryview", "'x' cannot be compared: this memoryview cannot"),
        (Lock(), ValueError, "this lock cannot be pickled", "'x' cannot be compared: this lock cannot be pickled"),
    )
    for check in adapters():
        for value, kind, text, elsewhere in wrong:
            with pytest.raises(kind if odd else ValueError, match=text if odd else None) as error:
                check({"w": 1, "x": value if odd else 1})
            if not odd:
                assert str(error.value).startswith(f"rank 1: check_consistency: {elsewhere}"), error.value
                assert str(error.value).endswith("[HVD237]")
        with pytest.raises(TypeError, match="" if odd else r"^rank 1: .*'x' cannot be compared: TypeError: t \[HVD237"):
            check({"x": Shown(TypeError("t")) if odd else 1})
        check([1])


@as_ranks(2)
def test_what_every_process_shows_otherwise_is_the_same():
    """Sets have the order of the process's hashes, and what shows no value shows an address."""
    tags = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"}
    same = {
        "tags": tags,
        "nested": [({"of": {(each, frozenset(tags)) for each in tags}},)],
        "object": object(),
        "lambda": lambda: None,
        "class": Shown,
        "function": told,
        "holds": Shown("text", tags=tags, call=lambda: None, array=np.ones(3)),
        "array": np.array([Shown("text"), {"a": tags}], object),
        "random": Random(1),
        "generator": np.random.default_rng(1),
        "keys": {"by set": {frozenset(tags): 1}, "by object": {object(): 1, object(): 2}},
        "itself": Shown("text"),
    }
    same["itself"].itself = same["itself"]
    odd = hvd.rank() == 1
    for check in adapters():
        check(same)
        parted(check, {"tags": tags - {"alpha"} if odd else tags}, "'tags' on rank 1 is not what rank 0 has")
        parted(check, {"f": told if odd else adapters}, "'f' on rank 1")
        parted(check, {"a": Shown("lr=2") if odd else Shown("lr=1")}, "'a' on rank 1")
        parted(check, {"a": np.array([{"s", 2 + odd}], object)}, "'a' on rank 1")
        parted(check, {"a": 1 if odd else object()}, "'a' on rank 1")
        for unclear in (Shown("text", found=odd), Shown(f"<at 0x{hvd.rank()}>")):
            with pytest.raises(ValueError, match="'x' cannot .*: the ranks' Shown objects show alike .*HVD237") as e:
                check({"ok": 1, "x": unclear})
            assert len(set(hvd.allgather_object(str(e.value)))) == 1
        parted(check, {"x": Shown("text", odd=odd), "y": odd}, "'y' on rank 1")  # what is known comes first
    if find_spec("torch") is not None:
        import torch

        import hvdlite.torch as hvdt

        drawn = {"g": torch.Generator().manual_seed(1), "kind": torch.float32, "on": torch.device("cpu")}
        hvdt.check_consistency(drawn)
        parted(hvdt.check_consistency, {"g": torch.Generator().manual_seed(hvd.rank())}, "'g' on rank 1")
        parted(hvdt.check_consistency, {"a": {"b": torch.ones(1) * hvd.rank()}}, "'a.b' on rank 1")


@as_ranks(2)
def test_paths_that_look_alike_are_told_apart_and_may_be_long():
    rank = deep = hvd.rank()
    for _ in range(5000):
        deep = [deep]
    own, one = np.array([float(rank)]), np.ones(1)
    for check in adapters():
        parted(check, {"a.b": own, "a": {"b": one}}, "\"'a.b'\" on rank 1 is not what rank 0 has")
        parted(check, {"a.b": one, "a": {"b": own}}, "\"'a'['b']\" on rank 1")
        parted(check, {"p": {1: own, "1": one}}, "\"'p'[1]\" on rank 1")
        parted(check, {"p": {1: one, "1": own}}, "\"'p'['1']\" on rank 1")
        swapped = {1: np.ones(1 + rank), "1": np.ones(2 - rank)}
        parted(check, {"p": swapped}, "rank 0 has 'p'['1'] [2] float64, 'p'[1] [1] float64; rank 1 has")
        parted(check, {"p": {object(): one, object(): own}}, "on rank 1 is")
        parted(check, {"p": {1: 1, 2: 2} if rank else {2: 2, 1: 1}}, "the same tensors in different orders")
        check({"p": {np.int64(1) if rank else 1: one}, "q": {"1": one}, "shared": [own[:0]] * 2})
        parted(check, {"x": deep}, ".0.0' on rank 1 is not what rank 0 has")
