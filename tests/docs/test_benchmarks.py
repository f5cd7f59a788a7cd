"""The benchmarks run, in a configuration whose figures mean nothing; and what table.py makes of launches is right.

Nothing is timed here. That a peer is missing is no failure: MPI is not installed for a test.
"""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import needs_hosts
from launching import Launch
from ranks import EVERYTHING, everything

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "examples/benchmarks"
SECONDS = 240


@pytest.fixture(scope="module", autouse=True)
def benchmarks_importable():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def run_all(*arguments):
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), "--tiny", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "part, works",
    [
        ("calls", ["allreduce_ of 4 B", "allreduce_ of 64 KB", "100 x 64 KB async"]),
        ("gradients", ["161 gradients of ResNet-50"]),
        ("step", ["exposed communication", "of it negotiation", "rounds in a step"]),
        ("hook", ["gradient hook, by the clock"]),
        ("idle", ["idle job"]),
        ("startup", ["import hvdlite beyond numpy"]),
    ],
)
def test_a_part_runs_and_its_launches_are_kept(part, works, tmp_path):
    pytest.importorskip("torch")
    results = tmp_path / "launches.jsonl"
    printed = run_all("--only", part, "-np", 2, "--results", results)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    found = {result["work"].strip() for record in records[1:] for result in record["results"]}
    assert "processor" in records[0]["machine"]
    disturbed = re.search(r"^[1-9]\d* launches dropped", printed, re.MULTILINE)  # by what else the machine does
    for work in works:
        assert any(name.startswith(work) for name in found), (work, found)
        assert work in printed or disturbed


@pytest.mark.parametrize("kinds", everything(["shm", "p2p"], ["torchrun"]))
def test_ranks_go_and_come(kinds):
    pytest.importorskip("torch")
    words = [sys.executable, str(BENCHMARKS / "elastic.py"), "--quick", "--only", *kinds]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in kinds:
        found = len(re.findall(rf" {kind} +\d+\.\d+ +\d+\.\d+ +1$", done.stdout, re.MULTILINE))
        assert found == (1 if kind == "torchrun" else 2), done.stdout


def test_a_pipeline_is_measured_beside_its_list_and_torch():
    pytest.importorskip("torch")
    with Launch("-np", 2, sys.executable, BENCHMARKS / "pipeline.py", "--patience", "tiny") as job:
        assert job.wait(SECONDS) == 0, job.out + job.err
    assert len(re.findall(r"sleeping, .* hvdlite / slept +\d", job.out)) == 5, job.out
    assert re.search(r"computing, 1f1b, .* hvdlite / torch +\d.* hvdlite / alone +\d", job.out), job.out


@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_tables_are_measured_beside_torchs_and_by_staleness():
    pytest.importorskip("torch")
    pytest.importorskip("zmq")
    printed = ""
    for ranks, program in (
        ("2", "parameter_server.py"),
        ("2", "many_tables.py"),
        ("2", "rpc.py"),
        ("4", "staleness.py"),
    ):
        words = [sys.executable, "-m", "hvdlite.launcher", "-np", ranks, sys.executable, str(BENCHMARKS / program)]
        done = subprocess.run([*words, "--patience", "tiny"], capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        printed += done.stdout
    for column, count in (("hvdlite", 3), ("hvdlite, not encrypted, 2 copies", 3), ("torch", 3)):
        assert len(re.findall(rf"(?:pull|push) +{column}(?:  +\d+\.\d\d){{5}}$", printed, re.MULTILINE)) == count, (
            printed
        )
    assert re.search(r"a step: \d+\.\d KB; .* KB: 0\.\d\d %", printed)
    leads = re.findall(r"staleness ([013]) .*lead (\d+)", printed)
    assert len(leads) == 3 and all(int(lead) <= int(staleness) for staleness, lead in leads), printed
    assert len(re.findall(r"seed \d: AUC 0\.\d+ at s = 0, 0\.\d+ of ASP", printed)) == 3, printed


@needs_hosts
@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_predictions_and_planned_pipelines_are_held_against_what_was_measured():
    """Their errors are printed and judged by eyes: what a machine does besides is in them."""
    for program, words in (("predictions.py", ["shm"]), ("planned_pipelines.py", [])):
        done = subprocess.run(
            [sys.executable, BENCHMARKS / program, *words], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0 and "measured" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_the_layout_that_is_chosen_is_measured_beside_the_others():
    """The ratio is printed and judged by eyes, as above."""
    pytest.importorskip("torch")
    words = [sys.executable, BENCHMARKS / "elastic_layouts.py", "--only", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n   3     4    14  \d x 1, 2 rows, .*  \d\.\d{3}(?: again)?\n", done.stdout), done.stdout
    assert len(re.findall(r"planned \d+\.\d, measured \d+\.\d ms", done.stdout)) == 3, done.stdout
    assert re.search(r"^[01] of 1 within 5 %, largest ratio \d\.\d{3}$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_an_aggregator_is_shared_by_two_jobs_and_killed():
    """How fairly it is shared in 5 s is printed and judged by eyes: the exit status says that too."""
    sums = {("--minute", "5"): r"pool \| [03] \|.* 0 \| \w{12}", ("--kill", "1"): r"pool \| 1 \| [01] \| 0 \|"}
    for words, row in sums.items():
        words = [sys.executable, BENCHMARKS / "aggregator.py", "--kind", "pool", *words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert len(re.findall(row, done.stdout)) == (2 if "--minute" in words else 1), done.stdout + done.stderr


def test_tcp_between_hosts_is_measured_beside_a_raw_stream():
    words = [sys.executable, str(BENCHMARKS / "wire.py"), "--patience", "tiny", "--settings", "1gbit+4ms"]
    words += ["--slots", "1,1", "--libraries", "raw,hvdlite"]
    pytest.importorskip("torch")
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1gbit\+4ms, ranks per host \(1, 1\), raw stream \d+\.\d+ Gbit/s", done.stdout)
    for size in ("4 KB", "256 KB", "16 MB", "16 MB mean", "gradients"):
        assert re.search(rf"{size} hvdlite +\d+ us .* of raw", done.stdout), done.stdout


@needs_hosts
@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_int8_and_int4_are_measured_between_hosts_beside_float32():
    pytest.importorskip("torch")
    words = [sys.executable, str(BENCHMARKS / "quantized_links.py"), "--rounds", "1", "--only", "2 hosts, 1 Gbit/s"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    for form in ("none", "fp16", "int8", "int4", "gloo", "ddp powersgd"):
        assert re.search(rf"^  {form} +\d+\.\d ms .* \d\.\d+x", done.stdout, re.MULTILINE), done.stdout


@needs_hosts
@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_training_with_compressed_gradients_is_drawn_beside_ddp(tmp_path):
    pytest.importorskip("torch")
    forms = [word for form in ("int4", "accordion", "ddp-power") for word in ("--only", form)]
    words = [sys.executable, str(BENCHMARKS / "compression_training.py"), "--rate", "1gbit", "--seconds", "3", *forms]
    done = subprocess.run([*words, "-o", tmp_path / "loss.svg"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^(?:int4|accordion|ddp-power)(?: +\d+\.\d+){4}$", done.stdout, re.MULTILINE)) == 3
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 3


@pytest.mark.skipif(not EVERYTHING, reason="tests/run everything")
def test_local_steps_are_measured_beside_sync_go_on_where_they_stopped_and_are_drawn(tmp_path):
    pytest.importorskip("torch")
    words = [sys.executable, str(BENCHMARKS / "low_communication.py")]
    few = ["--seeds", "0", "--ranks", "2", "--sync-every", "20", "--record-every", "20", "--steps", "40"]
    for only in (["--only", "sync"], []):
        command = [*words, "loss", "-o", tmp_path / "runs", *few, *only]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +2 +(?:1 +sync|20 +(?:local|diloco|streaming|int4)) .*\dx$", done.stdout, re.M)) == 5
    assert len((tmp_path / "runs").read_text().splitlines()) == 5
    subprocess.run([*words, "picture", tmp_path / "runs", "-o", tmp_path / "loss.svg"], check=True, timeout=SECONDS)
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 5


def test_the_plane_is_measured_in_c_in_every_dtype():
    programs = importlib.import_module("programs")
    for dtype in ("float32", "bfloat16", "float16"):
        lines = programs.run_quietly([programs.ours(), "2", dtype, "tiny"], SECONDS).splitlines()
        assert {line.split()[0] for line in lines} == {"private", "in-plane"}
        assert all(line.split()[1] == dtype for line in lines) and len(lines) == 6, lines
    lines = programs.run_quietly([programs.ours(), "2", "tiny", "4096"], SECONDS).splitlines()
    assert [line.split()[2] for line in lines] == ["4096", "4096"]


def test_a_word_that_the_harness_does_not_know_is_refused():
    programs = importlib.import_module("programs")
    with pytest.raises(RuntimeError, match="float64: expected a collective"):
        programs.run_quietly([programs.ours(), "2", "float64"], SECONDS)


def launch(program, before, after, **medians):
    results = [
        {"work": work.replace("_", " "), "column": program, "unit": "us", "median": us, "low": us, "high": us}
        for work, us in medians.items()
    ]
    keys = {"part": "plane", "ranks": 2, "program": program, "before": before, "after": after}
    return {**keys, "results": results, "failed": ""}


def test_states_are_kept_apart_and_launches_that_straddle_a_change_are_dropped():
    table = importlib.import_module("table")
    records = [
        launch("hvdlite", 60, 62, allreduce_float32_1_MB=40.0),
        launch("openmpi", 61, 60, allreduce_float32_1_MB=100.0),
        launch("hvdlite", 270, 268, allreduce_float32_1_MB=90.0),
        launch("openmpi", 272, 275, allreduce_float32_1_MB=60.0),
        launch("hvdlite", 60, 270, allreduce_float32_1_MB=1.0),
        launch("hvdlite", 60, 4000, allreduce_float32_1_MB=1.0),
    ]
    groups, dropped = table.by_state(records)
    assert dropped == 2
    assert [key[2].split(",")[0] for key in groups] == ["near", "far"]
    near, far = (part for part in table.tables(records).split("\n\n") if part.lstrip().startswith("plane"))
    assert re.search(r"2\.50 x of openmpi +1 x yes\n", near)
    assert re.search(r"0\.67 x of openmpi +1 x NO\n", far)


def test_a_median_over_launches_has_its_spread_beside_it():
    table = importlib.import_module("table")
    records = [launch("hvdlite", 60, 60, work=us) for us in (3.0, 1.0, 2.0)]
    assert "2.00       1.00       3.00 us            3" in table.tables(records)


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("pictures")
    records = [
        launch("hvdlite", 60, 60, allreduce_float32_4_KB=1.0, allreduce_float32_1_MB=100.0),
        launch("mpich", 60, 60, allreduce_float32_4_KB=2.0, allreduce_float32_1_MB=300.0),
        {**launch("hvdlite", 60, 60, step_alone=200.0, exposed_communication=10.0), "part": "step"},
    ]
    pictures.draw(records, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"bandwidth.png", "bandwidth.svg", "step.png", "step.svg"}
    assert "MPICH 5" in (tmp_path / "bandwidth.svg").read_text()


def test_time_after_the_last_gradient_is_moving_or_negotiation():
    pytest.importorskip("torch")
    step = importlib.import_module("step")
    happened = [
        ("start", 1),
        ("submit", 2),
        ("submit", 10),
        ("finish", 14),
        ("plan", 16),
        ("start", 20),
        ("finish", 29),
    ]
    negotiation, moving = step.divided([(name, 1_000_000 * ms) for name, ms in happened])
    assert (negotiation, moving) == (6.0, 13.0)  # 14 to 20; 10 to 14 and 20 to 29
    assert step.divided([]) == (0.0, 0.0)
