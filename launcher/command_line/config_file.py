"""`--config-file`: translate a YAML file with Horovod's keys, and some more, to a command line.

    controller: gloo
    params: {fusion_threshold_mb: 32, deterministic: true}
    autotune: {enabled: true, log_file: tuned.csv}
    timeouts: {start: 60, collective: 600, shutdown: 5}
    library_options: {gloo_timeout_seconds: 30}
    elastic: {min_np: 2, max-np: 8, blacklist_cooldown_range: [5, 300]}

The words stand before those of the command line, which therefore win. Nothing is passed over in silence, as Horovod
does it: an unknown key is an error that names the nearest known one. A null value counts as not given. A key may be
written with - as its flag is.

PyYAML is loaded when a file is given, and not needed otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from hvdlite import config
from hvdlite.errors import HvdOptionError
from hvdlite.errors.codes import coded

_PREFIX = {  # section: what stands before its keys in a flag
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
    "elastic": "",
}
_KEYS = {
    "params": "fusion_threshold_mb cycle_time_ms cache_capacity "
    "hierarchical_allreduce hierarchical_allgather torus_allreduce",
    "autotune": "enabled log_file warmup_samples steps_per_sample bayes_opt_max_samples gaussian_process_noise",
    "timeline": "filename mark_cycles",
    "stall_check": "enabled warning_time_seconds shutdown_time_seconds",
    "library_options": "mpi_threads_disable num_nccl_streams thread_affinity gloo_timeout_seconds",
    "logging": "level with_timestamp hide_timestamp",
    "timeouts": "start collective shutdown",
    "elastic": "min_np max_np slots_per_host elastic_timeout reset_limit blacklist_cooldown_range "
    "host_discovery_script rendezvous_timeout",
}
_FLAGS = {
    "autotune.enabled": "--autotune",
    "stall_check.enabled": "--stall-check",
    "timeouts.start": "--start-timeout",
    "timeouts.collective": "--collective-timeout",
    "timeouts.shutdown": "--leave-timeout",
}
_PAIRS = {"--blacklist-cooldown-range"}
_OFF = {"--log-with-timestamp": "--log-without-timestamp"}  # others: --no-...
_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi"}
_SECTIONS = f"{', '.join(_KEYS)} and controller; ranks and hosts are for the command line"


class FileError(ValueError):
    """The file cannot be used; the text says which key, and why."""


def words(path: str, known: Collection[str], typed: Collection[str]) -> list[str]:
    """The flags that the file at `path` stands for. known: all flags of the parser; typed: words of the command line.

    Raises FileError.
    """
    try:
        return _words(_read(path), known, typed)
    except FileError as error:
        raise FileError(coded("HVD714", f"--config-file {path}: {error}")) from None


def _read(path: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise FileError("reading it takes PyYAML: pip install pyyaml (or hvdlite[yaml]) [HVD807]") from None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        _distinct(yaml.compose(text, yaml.SafeLoader), "")
        return yaml.safe_load(text)
    except OSError as error:
        raise FileError(str(error.strerror)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise FileError(f"is no YAML{where}: {getattr(error, 'problem', None) or error}") from None


def _distinct(node: Any, prefix: str) -> None:
    """Refuses a key that stands twice, of which YAML takes the last and says nothing."""
    if not hasattr(node, "value") or not isinstance(node.value, list):
        return
    seen = set()
    for pair in node.value:
        if not isinstance(pair, tuple):
            continue
        name = f"{prefix}{pair[0].value}"
        if name in seen:
            raise FileError(f"{name} stands there twice, again in line {pair[0].start_mark.line + 1}")
        seen.add(name)
        _distinct(pair[1], f"{name}.")


def _words(tree: Any, known: Collection[str], typed: Collection[str]) -> list[str]:
    if tree is None:
        return []
    if not isinstance(tree, Mapping):
        raise FileError("must have sections, as in\n  params:\n    fusion_threshold_mb: 32")
    found: list[str] = []
    for section, keys in tree.items():
        if section == "controller":
            found += _controller(keys, typed)
        elif section not in _KEYS:
            near = _nearest(str(section), [*_KEYS, "controller"], tree)
            raise FileError(f"there is no section {section!r}{near or f'; there are {_SECTIONS}'}")
        elif isinstance(keys, Mapping):
            for key, value in keys.items():
                found += _flag(str(section), str(key).replace("-", "_"), value, known)
        elif keys is not None:
            raise FileError(f"{section}: must have keys ({', '.join(_KEYS[section].split())}), not {keys!r}")
    return found


def _controller(value: Any, typed: Collection[str]) -> list[str]:
    if value not in _CONTROLLERS:
        raise FileError(f"controller: {value!r}: must be gloo or mpi")
    return [] if set(_CONTROLLERS.values()) & set(typed) else [_CONTROLLERS[value]]


def _flag(section: str, key: str, value: Any, known: Collection[str]) -> list[str]:
    name = f"{section}.{key}"
    options = {option.name: option for option in config.OPTIONS if option.flag is not None}
    if key in _KEYS[section].split():
        flag = _FLAGS.get(name) or "--" + (_PREFIX[section] + key).replace("_", "-")
    elif section == "params" and key in options:
        flag = str(options[key].flag)
    else:
        every = {each: f"{section}.{each}" for section, keys in _KEYS.items() for each in keys.split()}
        every.update({each: f"params.{each}" for each in options if each not in every})
        raise FileError(f"there is no key {name!r}{_nearest(key, list(every), every)}")
    if value is None:
        return []
    no = _OFF.get(flag, "--no-" + flag[2:])
    if isinstance(value, bool):
        return [_switched(name, flag, no, value, known)]
    if flag in _PAIRS:
        both = value if isinstance(value, list) else str(value).split()
        if len(both) != 2:
            raise FileError(f"{name}: {value!r}: must be a value LOW and a value HIGH, as [5, 300]")
        return [flag, *map(str, both)]
    if isinstance(value, (Mapping, list)) or no in known:
        expected = "true or false" if no in known else "one value"
        raise FileError(f"{name}: {value!r}: must be {expected}")
    option = next((option for option in config.OPTIONS if option.flag == flag), None)
    try:
        config.variables_of({} if option is None else {option.name: str(value)})
    except HvdOptionError as error:
        raise FileError(f"{name}: {error}") from None
    return [f"{flag}={value}"]


def _switched(name: str, flag: str, no: str, value: bool, known: Collection[str]) -> str:
    if no not in known:
        raise FileError(f"{name}: {str(value).lower()}: must be a value, not true or false")
    return flag if value else no


def _nearest(key: str, names: list[str], full: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if not near:
        return ""
    return f"; did you mean {full.get(near[0]) if isinstance(full.get(near[0]), str) else near[0]}?"
