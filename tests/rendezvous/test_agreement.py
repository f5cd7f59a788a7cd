"""What init compares between ranks, which jobs it refuses, and which exception a failure becomes."""

import json

import pytest

from hvdlite import config, errors
from hvdlite.rendezvous import bootstrap
from hvdlite.rendezvous.discovery import Place


def record(version="1.0", wire=1, **options):
    told = dict.fromkeys(("local_rank", "local_size", "cross_rank", "cross_size"))
    agreed = {"fusion_threshold": 128, **options}
    return {"version": version, "wire": wire, "options": agreed, "host": "here", "host_id": "here", **told}


def test_equal_ranks_agree():
    assert bootstrap.disagreement([record()] * 4) is None


def test_what_is_alike_in_many_records_is_read_once():
    alike = json.dumps({"version": "1.0", "wire": 1, "options": {"fusion_threshold": 128}, "process_sets": []})
    parts = [f'{alike}\n{{"host": "n{rank // 64}", "local_rank": {rank % 64}}}'.encode() for rank in range(512)]
    records = bootstrap.records_of(parts)
    assert len({id(each["options"]) for each in records}) == 1
    assert [(each["host"], each["local_rank"]) for each in records[:66:65]] == [("n0", 0), ("n1", 1)]


@pytest.mark.parametrize("part", [b"", b"{}", b"{}\n", b"{}\n{},{}", b"[]\n{}", b"{}\n3", b"{\n{}"])
def test_what_is_no_record_is_an_error_of_init(part):
    with pytest.raises(errors.HvdInitError, match="the same hvdlite"):
        bootstrap.records_of([b"{}\n{}", part])


def test_one_of_many_that_differs_is_found():
    told = {"local_rank": None, "local_size": None, "cross_rank": None, "cross_size": None, "host": "a", "host_id": "a"}
    sayings = [
        {"version": "1.0", "wire": 1, "options": {"fusion_threshold": 128 + (rank == 400)}} for rank in range(512)
    ]
    records = bootstrap.records_of([f"{json.dumps(says)}\n{json.dumps(told)}".encode() for says in sayings])
    text = bootstrap.disagreement(records)
    assert "rank 400 has 129" in text and "ranks 0-399, 401-511 have 128" in text


def test_a_differing_option_names_itself_the_ranks_and_the_values():
    records = [record(), record(), record(fusion_threshold=5), record(), record(fusion_threshold=5)]
    text = bootstrap.disagreement(records)
    assert "HVDLITE_FUSION_THRESHOLD" in text
    assert "ranks 0-1, 3 have 128" in text and "ranks 2, 4 have 5" in text


def test_all_ranks_must_mean_the_same_by_silence():
    """Else the one with the shorter patience would end the job of all."""
    told = [config.read({"HVDLITE_PEER_TIMEOUT": seconds}).agreed() for seconds in ("30", "5")]
    text = bootstrap.disagreement([record(**options) for options in told])
    assert "HVDLITE_PEER_TIMEOUT" in text and "rank 0 has 30" in text and "rank 1 has 5" in text


def test_one_differing_rank_is_in_the_singular():
    assert "rank 1 has 7" in bootstrap.disagreement([record(), record(fusion_threshold=7)])


def test_different_versions_are_named_first():
    text = bootstrap.disagreement([record(), record(version="2.0", fusion_threshold=5)])
    assert "rank 0 has '1.0'" in text and "rank 1 has '2.0'" in text
    assert "wire" in bootstrap.disagreement([record(), record(wire=2)])


def test_a_local_size_that_is_not_so_is_a_disagreement():
    records = [{**record(), "local_rank": rank, "local_size": 2, "host_id": str(rank)} for rank in range(2)]
    assert "rank 0 was told that 2 of 2 ranks are on its host" in bootstrap.disagreement(records)


def place(size=2, source="HVDLITE_ variables", local=(0, 2), cross=(0, 1)):
    return Place(0, size, *local, *cross, source)


@pytest.mark.parametrize("source", ["Open MPI", "MPICH or Intel MPI"])
def test_other_launchers_are_refused_above_one_rank(source):
    text = bootstrap.refusal(place(source=source))
    assert source in text and "yet" in text and "hvdlite-run -np 2" in text
    assert bootstrap.refusal(place(1, source, (None, None), (None, None))) is None


def test_any_number_of_hosts_is_taken_and_places_on_them_are_found_where_nobody_tells():
    assert bootstrap.refusal(place(4, cross=(0, 2))) is None
    assert bootstrap.refusal(place(local=(None, None))) is None
    assert bootstrap.refusal(place()) is None


def test_without_a_store_the_remedy_is_the_launcher():
    with pytest.raises(errors.HvdInitError, match=r"HVDLITE_STORE_ADDR.*hvdlite-run -np 2"):
        bootstrap.meet(place(), config.read({}), "1", 1)


def test_classes_of_errors():
    assert issubclass(errors.HvdMismatchError, ValueError) and issubclass(errors.HvdMismatchError, errors.HvdError)
    assert issubclass(errors.HvdPeerLostError, errors.HorovodInternalError)
    assert issubclass(errors.HvdNotInitializedError, ValueError)
    assert issubclass(errors.HvdError, RuntimeError)
    assert not issubclass(errors.HvdMismatchError, errors.HorovodInternalError)  # elastic must not retry a bug


def test_codes_become_exceptions_with_the_rank():
    lost = errors.error_of("HVD_EPEER", "rank 3 is gone", 3)
    assert type(lost) is errors.HvdPeerLostError and lost.rank == 3 and str(lost) == "rank 3 is gone"
    assert type(errors.error_of("HVD_EDUP", "x")) is ValueError
    assert type(errors.error_of("HVD_ENEW", "x")) is errors.HorovodInternalError


def test_every_code_of_the_core_has_a_class():
    from hvdlite import _core

    assert set(_core._CODE_NAMES.values()) == set(errors.CLASS_OF_CODE)
