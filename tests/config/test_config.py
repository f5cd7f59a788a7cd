"""The table of options: what is read, what is refused, what is told; and that reading it costs nothing heavy."""

import argparse
import re

import pytest

from hvdlite import config
from hvdlite.errors import HvdInitError, HvdOptionError

TEXTS = """
wire_auth=1 job_id=00000000000000ff store_addr=127.0.0.1 plane=shm algo=ring link_cost=50,8.5 shared_memory=dev_shm
check_data=1 autotune=1 deterministic=1 nan_guard=warn autotune_log=trials.csv trace_dir=there timeline=line.json
timeline_mark_cycles=1 stall_check_disable=1 trace_steps=1 metrics_host=0.0.0.0 check_start=raise servers=2
gradient_allocator=0 ps_curve=0 wire=int8 aggregators=1 aggregator_kind=hashed aggregator_key=key aggregator=a:1
 preload=torch,numpy
"""
TEXTS = {"secret_key": "0f" * 32, **dict(word.split("=") for word in TEXTS.split())}
DEFAULTS = {option.name: option.default for option in config.OPTIONS}
FLAGGED = [option for option in config.OPTIONS if option.flag is not None]


@pytest.mark.parametrize("option", config.OPTIONS, ids=lambda option: option.name)
def test_the_default_that_is_shown_is_a_value(option):
    assert option.default_text is None or config.read({option.variable: option.default_text}).values == DEFAULTS


def test_help_shows_defaults_as_values_and_names_as_they_are():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    for action in parser._actions[1:]:
        default = re.search(r"Default (\S+); environment", action.help)
        assert default is None or config.variables_of({action.dest: default[1]}), action.help
        names = set(re.findall(r"\b[A-Z][A-Z_]+\b|\brank-K\S+", config.option_of(action.dest).help))
        assert action.help.startswith("Not --") or all(name in action.help for name in names), action.help


def test_an_empty_environment_gives_the_defaults():
    settings = config.read({})
    assert settings.values == DEFAULTS
    assert set(settings.origin.values()) == {None} and settings.notes == []


@pytest.mark.parametrize("option", config.OPTIONS, ids=lambda option: option.name)
def test_a_value_is_read_under_both_names(option):
    text = TEXTS.get(option.name, "64")
    settings = config.read({option.variable: text})
    assert settings.values[option.name] != option.default
    assert settings.origin[option.name] == option.variable and settings.values[option.name] is not None
    if option.alias_variable is not None:
        aliased = config.read({option.alias_variable: text})
        assert aliased.values[option.name] == settings.values[option.name]
        assert aliased.notes == [f"of Horovod's variables: honoured {option.alias_variable}"]


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("HVDLITE_FUSION_THRESHOLD", "64MB", "whole number"),
        ("HVDLITE_DETERMINISTIC", "yes", "0 or 1"),
        ("HOROVOD_FUSION_THRESHOLD", "(None,)", "whole number"),
        ("HVDLITE_FUSION_THRESHOLD", "-1", "at least 0"),
        ("HVDLITE_FUSION_THRESHOLD", "", "whole number"),
        ("HVDLITE_START_TIMEOUT", "soon", "a number"),
        ("HVDLITE_START_TIMEOUT", "nan", "a number"),
        ("HVDLITE_START_TIMEOUT", "inf", "a number"),
        ("HVDLITE_START_TIMEOUT", "0", "at least"),
        ("HVDLITE_LEAVE_TIMEOUT", "1e9", "at most"),
        ("HVDLITE_TRACE_EVENTS", "1000", "power of two"),
        ("HVDLITE_TRACE_EVERY", "0", "at least 1"),
        ("HVDLITE_METRICS_PORT", "-1", "at least 0"),
        ("HVDLITE_METRICS_PORT", "65536", "at most 65535"),
        ("HVDLITE_METRICS_INTERVAL", "-1", "at least 0.1"),
        ("HVDLITE_SPIN_US", "-2", "at least -1"),
        ("HVDLITE_NAN_GUARD", "2", "off, warn, raise"),
        ("HVDLITE_WIRE", "int2", "none, fp16, bf16, int8 or int4"),
        ("HVDLITE_LINK_COST", "50", "two numbers"),
        ("HVDLITE_LINK_COST", "50,0", "greater than zero"),
        ("HVDLITE_LINK_COST", "fast,8", "as in 50,8"),
        ("HVDLITE_LINK_COST", "nan,8", "two numbers"),
        ("HVDLITE_LINK_COST", "1e300,8", "two numbers"),
        ("HVDLITE_CACHE_CAPACITY", "1e3", "whole number"),
        ("HOROVOD_RANK", "first", "whole number"),
        ("HVDLITE_SIZE", "0", "at least 1"),
        ("HVDLITE_STORE_PORT", "70000", "at most 65535"),
        ("HVDLITE_JOB_ID", "12", "16 hexadecimal"),
        ("HVDLITE_AUTOTUNE_WARMUP_SAMPLES", "-1", "at least 0"),
        ("HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE", "0", "at least 1"),
        ("HVDLITE_AUTOTUNE_MAX_SAMPLES", "15", "at least 16"),
    ],
)
def test_a_malformed_value_names_variable_and_value(variable, value, wanted):
    with pytest.raises(HvdOptionError) as caught:
        config.read({variable: value})
    assert f"{variable}={value!r}: must be " in str(caught.value) and wanted in str(caught.value)
    assert isinstance(caught.value, (HvdInitError)) and isinstance(caught.value, ValueError)


def test_a_malformed_secret_is_not_shown():
    with pytest.raises(HvdOptionError) as caught:
        config.read({"HVDLITE_SECRET_KEY": "5ec4e7"})
    assert "HVDLITE_SECRET_KEY" in str(caught.value) and "5ec4e7" not in str(caught.value)


def test_two_names_that_disagree_are_an_error_that_shows_both():
    with pytest.raises(HvdOptionError, match=r"HVDLITE_CACHE_CAPACITY='5' and HOROVOD_CACHE_CAPACITY='6'"):
        config.read({"HVDLITE_CACHE_CAPACITY": "5", "HOROVOD_CACHE_CAPACITY": "6"})
    assert config.read({"HVDLITE_CACHE_CAPACITY": "5", "HOROVOD_CACHE_CAPACITY": "05"}).notes == []


def test_an_unknown_variable_is_told_with_the_nearest_name():
    (note,) = config.read({"HVDLITE_FUSION_TRESHOLD": "1", "HVDLITE_NVTX": "1"}).notes
    assert "HVDLITE_FUSION_TRESHOLD (did you mean HVDLITE_FUSION_THRESHOLD?)" in note
    assert note.endswith("HVDLITE_NVTX [HVD804]")


def test_one_line_says_what_became_of_horovods_variables():
    environ = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_CACHE_CAPACITY": "7", "HOROVOD_START_TIMOUT": "3", "PATH": "/"}
    (note,) = config.read(environ).notes
    assert "honoured HOROVOD_CACHE_CAPACITY" in note
    assert "HOROVOD_CYCLE_TIME (there is no cycle" in note
    assert "HOROVOD_START_TIMOUT (did you mean HOROVOD_START_TIMEOUT?)" in note


def test_what_the_launcher_sets_is_not_worth_a_line():
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    environ = {prefix + name: "1" for name in names for prefix in ("HVDLITE_", "HOROVOD_")}
    assert config.read({**environ, "HOROVOD_HOSTNAME": "here"}).notes == []


@pytest.mark.parametrize("option", FLAGGED, ids=lambda option: option.name)
def test_a_flag_becomes_the_variable_that_reads_back_as_the_same(option):
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    assert config.variables_of(vars(parser.parse_args([]))) == {}
    text = TEXTS.get(option.name, "128")
    words = [option.flag] if option.is_switch else [option.flag, text]
    variables = config.variables_of(vars(parser.parse_args(words)))
    assert list(variables) == [option.variable]
    value = config.read(variables).values[option.name]
    assert value == (128 * option.flag_unit if text == "128" else option.type(text))


def test_a_size_in_megabytes_may_be_a_fraction():
    assert config.variables_of({"fusion_threshold": "0.5"}) == {"HVDLITE_FUSION_THRESHOLD": str(1 << 19)}


def test_only_options_that_all_ranks_share_are_agreed():
    agreed = "fusion_threshold cache_capacity plane algo deterministic nan_guard link_cost metrics_port peer_timeout"
    more = "votes wire_auth check_start check_data servers ps_curve wire aggregators aggregator_kind"
    assert set(config.read({}).agreed()) == {*agreed.split(), *more.split()}


def test_the_cost_of_a_link_is_told_in_microseconds_and_nanoseconds_a_byte():
    assert config.read({"HVDLITE_LINK_COST": " 50,8.5 "}).values["link_cost"] == [50000, 8500]


def test_names_are_unique_and_documented():
    for column in ("name", "variable", "alias_variable", "flag"):
        values = [getattr(option, column) for option in config.OPTIONS if getattr(option, column) is not None]
        assert len(values) == len(set(values)), column
    for option in config.OPTIONS:
        assert option.variable in config.documentation() and option.help.endswith(".")
        if option.alias_variable is not None:
            assert option.alias_variable.removeprefix("HOROVOD_") not in config.SUPERSEDED
