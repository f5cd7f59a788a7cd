"""The option `wire`: which compression optimizers get, that rank 0 says so once, and that ranks must agree."""

import os

import hvdlite as hvd
from hvdlite import config
from hvdlite.numpy import Compression
from hvdlite.ops import wire

SAID = "hvdlite: --wire int8: gradients of optimizers whose script names no compression travel as int8\n"


def test_only_the_default_compression_is_replaced(monkeypatch):
    for name in ("none", "fp16", "bf16", "int8", "int4"):
        monkeypatch.setenv("HVDLITE_WIRE", name)
        assert wire.wire_compression(Compression.none, Compression) is getattr(Compression, name)
        assert wire.wire_compression(Compression.fp16, Compression) is Compression.fp16
        assert wire.wire_compression(Compression.int4, Compression) is Compression.int4
    monkeypatch.delenv("HVDLITE_WIRE")
    assert wire.wire_compression(Compression.none, Compression) is Compression.none
    assert not wire._announced[0], "nobody speaks before init()"


def on_rank():
    os.environ["HVDLITE_WIRE"] = "int8"
    hvd.init()
    for _ in range(2):
        assert wire.wire_compression(Compression.none, Compression) is Compression.int8


def test_rank_0_says_it_once(capfd):
    hvd.run(on_rank, num_proc=2)
    assert capfd.readouterr().err.count(SAID) == 1


def test_the_flag_is_the_variable_and_all_ranks_have_it():
    assert config.variables_of({"wire": "int4"}) == {"HVDLITE_WIRE": "int4"}
    assert config.read({"HVDLITE_WIRE": "int4"}).agreed()["wire"] == "int4"
