"""`--config-file`: Horovod's YAML as flags, the command line's win, and nothing is passed over in silence."""

import pytest
from launching import answers, launch

from hvdlite.launcher import cli
from hvdlite.launcher.command_line import config_file

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
  warning_time_seconds: 120
  shutdown_time_seconds: 300
library_options:
  mpi_threads_disable: false
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: DEBUG
  with_timestamp: false
elastic:
  min-np: 1
  max_np: 1
  slots_per_host: null
  elastic-timeout: 700
  reset_limit: 3
  blacklist-cooldown-range: [5, 60]
"""
FLAGS = """
--gloo --fusion-threshold-mb=32 --cycle-time-ms=5 --cache-capacity=2048 --hierarchical-allreduce
--no-hierarchical-allgather --autotune --autotune-log-file=tuned.csv --autotune-warmup-samples=5
--autotune-steps-per-sample=20 --autotune-bayes-opt-max-samples=50 --autotune-gaussian-process-noise=0.2
--no-timeline-mark-cycles --no-stall-check --stall-check-warning-time-seconds=120
--stall-check-shutdown-time-seconds=300 --no-mpi-threads-disable --num-nccl-streams=2 --thread-affinity=1
--gloo-timeout-seconds=60 --log-level=DEBUG --log-without-timestamp
--min-np=1 --max-np=1 --elastic-timeout=700 --reset-limit=3 --blacklist-cooldown-range 5 60
"""


def test_horovods_keys_are_flags_of_the_same_names(tmp_path):
    (tmp_path / "some.yaml").write_text(HOROVODS)
    assert config_file.words(str(tmp_path / "some.yaml"), KNOWN, []) == FLAGS.split()


def test_the_command_line_wins(tmp_path):
    (tmp_path / "some.yaml").write_text(
        "controller: mpi\nparams: {fusion_threshold_mb: 32, deterministic: true}\ntimeouts: {start: 50, shutdown: 4}\n"
    )
    words = ("--config-file", tmp_path / "some.yaml", "--gloo", "--no-deterministic", "--leave-timeout", 6, "-np", 1)
    code, out, err = launch(*words, "env")
    assert code == 0, err
    for line in ("FUSION_THRESHOLD=33554432", "DETERMINISTIC=0", "START_TIMEOUT=50", "LEAVE_TIMEOUT=6"):
        assert f"HVDLITE_{line}\n" in out


REFUSED = [
    ("parms: {}", "there is no section 'parms'; did you mean params?"),
    (
        "params: {fusion_treshold_mb: 3}",
        "there is no key 'params.fusion_treshold_mb'; did you mean params.fusion_thres",
    ),
    ("params: {log_file: a}", "there is no key 'params.log_file'; did you mean autotune.log_file?"),
    ("autotune: {zzzz: 1}", "there is no key 'autotune.zzzz'"),
    ("np: 4", "there is no section 'np'; there are params, autotune, timeline"),
    ("hosts: a", "ranks and hosts are for the command line"),
    ("params: {cycle_time_ms: 3, cycle_time_ms: 4}", "params.cycle_time_ms stands there twice, again in line 1"),
    ("params: {}\nlogging: {}\nparams: {}", "params stands there twice, again in line 3"),
    ("params: 3", "params: must have keys (fusion_threshold_mb"),
    ("- a", "must have sections"),
    ("controller: jsrun", "controller: 'jsrun': must be gloo or mpi"),
    ("params: {cache_capacity: lots}", "params.cache_capacity: --cache-capacity='lots': must be a whole number"),
    ("params: {cache_capacity: true}", "params.cache_capacity: true: must be a value"),
    ("params: {cache_capacity: [1]}", "params.cache_capacity: [1]: must be one value"),
    ("autotune: {enabled: 3}", "autotune.enabled: 3: must be true or false"),
    ("timeline: {filename: true}", "timeline.filename: true: must be a value"),
    ("stall_check: {enabled: 5}", "stall_check.enabled: 5: must be true or false"),
    ("stall_check: {warn_time_seconds: 5}", "did you mean stall_check.warning_time_seconds?"),
    ("logging: {level: loud}", "--log-level loud: must be one of"),
    ("logging: {with_timestamp: 1}", "logging.with_timestamp: 1: must be true or false"),
    ("library_options: {num_nccl_streams: true}", "library_options.num_nccl_streams: true: must be a value"),
    ("elastic: {blacklist_cooldown_range: 5}", "elastic.blacklist_cooldown_range: 5: must be a value LOW and a value"),
    ("elastic: {min_mp: 5}", "did you mean elastic.min_np?"),
    ("params: {a: 1\nb", "is no YAML, line 2"),
    ("params: {cycle_time_ms: fast}", "--cycle-time-ms"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Answers by the text of a file."""
    folder = tmp_path_factory.mktemp("said")
    for number, (text, _) in enumerate(REFUSED):
        (folder / f"{number}.yaml").write_text(text)
    jobs = [("--config-file", folder / f"{number}.yaml", "-np", 1, "true") for number in range(len(REFUSED))]
    return dict(zip([text for text, _ in REFUSED], answers(jobs, folder)))


@pytest.mark.parametrize("text, says", REFUSED)
def test_what_cannot_be_is_refused(text, says, said):
    code, out, err = said[text]
    assert (code, out) == (2, "") and says in err and "Traceback" not in err, err


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "some.yaml").write_text("# nothing\n")
    assert launch("--config-file", tmp_path / "some.yaml", "-np", 1, "true")[0] == 0


def test_every_key_is_a_flag():
    for section, keys in config_file._KEYS.items():
        for key in keys.split():
            for value in (True, False, "70"):
                try:
                    words = config_file._flag(section, key, value, KNOWN)
                except config_file.FileError as error:
                    assert "must be a value" in str(error) or "must be true or false" in str(error), error
                else:
                    assert all(word.partition("=")[0] in KNOWN for word in words)


def test_horovods_file_runs_a_job(tmp_path):
    (tmp_path / "some.yaml").write_text(HOROVODS)
    code, out, err = launch("--config-file", tmp_path / "some.yaml", "-np", 1, "env")
    assert code == 0 and "HOROVOD_LOG_LEVEL=DEBUG\n" in out and "HVDLITE_COLLECTIVE_TIMEOUT=0\n" in out, err
    assert err.count("without effect: ") == 1
