"""`--config-file`: Horovod's YAML as flags, the command line's win, and nothing is passed over in silence."""

import pytest
from launching import launch

from hvdlite.launcher import cli, config_file, flags

yaml = pytest.importorskip("yaml")
KNOWN = {flag for action in cli._parser()._actions for flag in action.option_strings}

HOROVODS = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: true
  log_file: tuned.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.2
timeline:
  filename: null
  mark_cycles: false
stall_check:
  enabled: false
library_options:
  mpi_threads_disable: false
  gloo_timeout_seconds: 60
"""


def test_horovods_keys_are_flags_of_the_same_names(tmp_path):
    (tmp_path / "some.yaml").write_text(HOROVODS)
    assert config_file.words(str(tmp_path / "some.yaml"), KNOWN, []) == [
        "--gloo",
        "--fusion-threshold-mb=32",
        "--cycle-time-ms=5",
        "--cache-capacity=2048",
        "--hierarchical-allreduce",
        "--no-hierarchical-allgather",
        "--autotune",
        "--autotune-log-file=tuned.csv",
        "--autotune-warmup-samples=5",
        "--autotune-steps-per-sample=20",
        "--autotune-bayes-opt-max-samples=50",
        "--autotune-gaussian-process-noise=0.2",
        "--gloo-timeout-seconds=60",
    ]


def test_the_command_line_wins(tmp_path):
    (tmp_path / "some.yaml").write_text(
        "controller: mpi\nparams: {fusion_threshold_mb: 32, deterministic: true}\ntimeouts: {start: 50, shutdown: 4}\n"
    )
    words = ("--config-file", tmp_path / "some.yaml", "--gloo", "--no-deterministic", "--leave-timeout", 6, "-np", 1)
    code, out, err = launch(*words, "env")
    assert code == 0, err
    for line in ("FUSION_THRESHOLD=33554432", "DETERMINISTIC=0", "START_TIMEOUT=50", "LEAVE_TIMEOUT=6"):
        assert f"HVDLITE_{line}\n" in out


@pytest.mark.parametrize(
    "text, says",
    [
        ("parms: {}", "there is no section 'parms'; did you mean params?"),
        (
            "params: {fusion_treshold_mb: 3}",
            "there is no key 'params.fusion_treshold_mb'; did you mean params.fusion_thres",
        ),
        ("params: {log_file: a}", "there is no key 'params.log_file'; did you mean autotune.log_file?"),
        ("autotune: {zzzz: 1}", "there is no key 'autotune.zzzz'"),
        ("params: 3", "params: must have keys (fusion_threshold_mb"),
        ("- a", "must have sections"),
        ("controller: jsrun", "controller: 'jsrun': must be gloo or mpi"),
        ("params: {cache_capacity: lots}", "params.cache_capacity: --cache-capacity='lots': must be a whole number"),
        ("params: {cache_capacity: true}", "params.cache_capacity: true: must be a value"),
        ("params: {cache_capacity: [1]}", "params.cache_capacity: [1]: must be one value"),
        ("autotune: {enabled: 3}", "autotune.enabled: 3: must be true or false"),
        ("timeline: {filename: a.json}", "not yet: timeline.filename: "),
        ("params: {a: 1\nb", "is no YAML, line 2"),
        ("params: {cycle_time_ms: fast}", "--cycle-time-ms"),
    ],
)
def test_what_cannot_be_is_refused(text, says, tmp_path):
    (tmp_path / "some.yaml").write_text(text)
    code, out, err = launch("--config-file", tmp_path / "some.yaml", "-np", 1, "true")
    assert (code, out) == (2, "") and says in err and "Traceback" not in err, err


def test_a_file_that_is_not_there_and_an_empty_one(tmp_path):
    assert "--config-file /no/such: No such file" in launch("--config-file", "/no/such", "-np", 1, "true")[2]
    (tmp_path / "some.yaml").write_text("# nothing\n")
    assert launch("--config-file", tmp_path / "some.yaml", "-np", 1, "true")[0] == 0


def test_every_key_is_a_flag_or_refused():
    for section, keys in config_file._KEYS.items():
        for key in keys.split():
            try:
                words = config_file._flag(section, key, True, KNOWN) or config_file._flag(section, key, False, KNOWN)
            except config_file.FileError as error:
                assert "not yet" in str(error) or "must be a value" in str(error), error
            else:
                assert all(word in KNOWN and word not in flags.NOT_YET for word in words)
