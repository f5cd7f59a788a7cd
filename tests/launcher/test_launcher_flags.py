"""Flags of horovodrun and torchrun: each is taken, with what it means here; and what completes them."""

import argparse
import os
import sys

import pytest
from launching import launch

from hvdlite.launcher import cli, output_flags
from hvdlite.launcher.command_line import flags
from hvdlite.launcher.hosts.hosts import Host, assign

HOROVODRUNS = """-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
--network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp --log-hide-timestamp
--no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile --gloo --mpi
--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
--blacklist-cooldown-range --host-discovery-script"""
NOT_HERE = "--jsrun"
TORCHRUNS = """--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --standalone --max-restarts -m
--module --log-dir --local-ranks-filter --node-rank --master-addr --master-port
--rdzv-conf --monitor-interval --start-method --role"""


def known():
    return {flag for action in cli._parser()._actions for flag in action.option_strings}


def test_every_flag_of_horovodrun_and_torchrun_is_taken_or_refused_with_its_reason():
    assert set(HOROVODRUNS.split()) | set(TORCHRUNS.split()) <= known()
    assert set(NOT_HERE.split()) == set(flags.NOT_YET)


def given(*words, **settings):
    """What ranks find of these flags, and what the launcher says of them."""
    code, out, err = launch(*words, "-np", 1, "env", **settings)
    assert code == 0, err
    return dict(line.partition("=")[::2] for line in out.splitlines()), err


def test_timeline_and_log_are_told_to_the_ranks_and_of_log_nothing_is_promised():
    words = "--timeline-filename a.json --timeline-mark-cycles --log-level debug --log-without-timestamp"
    environ, err = given(*words.split())
    assert environ["HVDLITE_TIMELINE"] == os.path.abspath("a.json") and environ["HVDLITE_TIMELINE_MARK_CYCLES"] == "1"
    assert environ["HOROVOD_LOG_LEVEL"] == "DEBUG" and environ["HOROVOD_LOG_HIDE_TIME"] == "1"
    assert err.count("without effect: ") == 1 and "timeline" not in err
    assert "log levels come with a later version" in err


def test_what_asks_for_nothing_is_no_line():
    environ, err = given("--no-timeline-mark-cycles", "--log-without-timestamp", "--stall-check", "--no-stall-check")
    assert err == "" and environ["HVDLITE_TIMELINE_MARK_CYCLES"] == "0"


def test_the_time_of_reports_is_told_by_either_flag():
    for words in ("--stall-check-warning-time-seconds 7", "--stall-check-time 7"):
        environ, err = given(*words.split())
        assert environ["HVDLITE_STALL_CHECK_TIME"] == "7" and err == ""


@pytest.mark.parametrize(
    "words, variable, limit, disabled",
    [
        ("--stall_check_shutdown_time_seconds 90", None, "90", None),
        ("--stall-check-shutdown-time-seconds 90 --stall-check", None, "90", "0"),
        ("--stall-check-shutdown-time-seconds=90 --no-stall-check", None, "0", "1"),
        ("--stall-check-shutdown-time-seconds 90 --collective-timeout 5", None, "5", None),
        ("--stall-check-shutdown-time-seconds 0", "5", "0", None),
        ("--no-stall-check --collective-timeout 6", "5", "6", "1"),
        ("--stall-check", "5", "5", "0"),
        ("--stall-check-shutdown-time-seconds 7", "5", "7", None),
    ],
)
def test_a_job_that_stalls_ends_after_the_shutdown_time_and_flags_beat_variables(words, variable, limit, disabled):
    more = {"HVDLITE_COLLECTIVE_TIMEOUT": variable} if variable else {}
    environ, err = given(*words.split(), **more)
    assert environ["HVDLITE_COLLECTIVE_TIMEOUT"] == limit and err == ""
    assert environ.get("HOROVOD_STALL_CHECK_DISABLE") == disabled


def test_the_shutdown_time_ends_a_job_that_stalls():
    body = "import hvdlite as hvd, numpy as np; hvd.init(); hvd.rank() and input(); hvd.allreduce(np.ones(2), name='x')"
    words = ("-np", 2, "--stall-check-shutdown-time-seconds", 1, "--failure-grace", 0)
    code, _, err = launch(*words, "sh", "-c", 'sleep 600 | "$0" -c "$1"', sys.executable, body)
    assert code != 0 and "1 s" in err and "x" in err, err


def test_obsolete_flags_are_one_line():
    words = "--num-nccl-streams 2 --thread-affinity 1 --mpi-threads-disable --cycle-time-ms 3.5 --no-torus-allreduce"
    words += " --rdzv_conf timeout=9 --monitor_interval 0.5 --start-method spawn --role trainer"
    environ, err = given(*words.split(), "--cycle-time-ms=4")
    assert err.count("--cycle-time-ms (there is no cycle: ") == 1
    assert (
        err.count("hvdlite-run: ") == err.count("without effect: ") == 1 and "HOROVOD_NUM_NCCL_STREAMS" not in environ
    )
    assert all(f"{word.replace('_', '-')} (" in err for word in words.split() if word.startswith("--"))


def test_output_dir_is_another_name(tmp_path):
    assert launch("-np", 1, "--output-dir", tmp_path, "echo", "x")[0] == 0
    assert (tmp_path / "rank.0" / "stdout").read_text() == "x\n"


def test_local_ranks_are_shown_on_each_host():
    code, out, _ = launch("-np", 3, "--local_ranks_filter", "1-2", "sh", "-c", "echo $RANK")
    assert code == 0 and sorted(out.splitlines()) == ["[1]<stdout>:1", "[2]<stdout>:2"]
    slots = assign([Host("a", 2), Host("b", 3)], 5)
    asked = argparse.Namespace(shown="0-3", local_shown="1")
    look = output_flags.Look(ranks={0, 1, 2, 3}, local_ranks={1})
    assert output_flags.placed(look, slots).ranks == {1, 3} and output_flags.missing(asked, look, slots) is None
    assert output_flags.placed(look._replace(ranks=None), slots).ranks == {1, 3}


def test_rank_0_has_a_terminal_when_asked():
    body = (
        "import os\n"
        "def written(text): os.write(1, text)\n"
        "written(b'%d %d %d\\n' % (os.isatty(0), os.isatty(1), os.isatty(2)))\n"
        "if os.isatty(1): written(b'%d %d\\n' % os.get_terminal_size(1))\n"
        "written(b'10%\\r100%\\nthe end')\n"
    )
    code, out, err = launch("-np", 2, "--pty", sys.executable, "-c", body)
    said = [sorted(line[12:] for line in out.split("\n") if line.startswith(f"[{rank}]")) for rank in (0, 1)]
    assert code == 0 and "0 1 1" in said[0] and "68 24" in said[0] and "0 0 0" in said[1], out + err
    assert "the end" in said[0] and "\r\n" not in out
    assert launch("-np", 1, "--pty", "sh", "-c", "exit 7")[0] == 7
    assert launch("-np", 1, "sh", "-c", "test -t 1")[0] == 1


def test_much_output_through_a_terminal_is_whole():
    body = "for i in range(20000): print(i)"
    code, out, err = launch("-np", 1, "--pty", sys.executable, "-c", body)
    assert code == 0 and out.splitlines() == [str(i) for i in range(20000)], err


def test_help_names_every_flag_that_is_not_obsolete():
    code, out, _ = launch("--help-all", COLUMNS="200")
    assert code == 0 and all(
        flag in out for flag in set(HOROVODRUNS.split()) - set(flags.OBSOLETE) if "hide" not in flag
    )
