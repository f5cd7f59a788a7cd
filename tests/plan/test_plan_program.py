"""hvdlite-plan, in this process: what its subcommands print and write, and the line for what cannot be read or done."""

import json
import xml.etree.ElementTree as Xml
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdlite import plan
from hvdlite.plan import cli, draw, registry
from hvdlite.plan.table import MOVES_MAX
from hvdlite.predict import recording

DGX1P = str(Path(__file__).resolve().parents[2] / "examples/plans/dgx1p-6.json")
RING = {"format": "hvdlite-plan-1", "name": "mine", "kind": "allreduce", "size": 2, "chunks": 1, "root": 0}
RIGHT = [[0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0]]
GRAPH = {"format": "hvdlite-topology-1", "ranks": 3, "alpha_us": 5, "links": [[0, 1, 25], [1, 2, 25]]}
HOSTS = {"format": "hvdlite-topology-1", "hosts": [[0, 1], [2, 3]], "inside": [5, 25], "across": [20, 3]}
LAYER = {"name": "a", "forward_ms": 1.0, "backward_ms": 2.0, "activation": 0, "weights": 1000}
LAYERS = {"format": "hvdlite-layers-1", "layers": [{**LAYER, "name": each} for each in "abcd"]}
PROGRAM = {"format": "hvdlite-program-1", "axes": [["dp", 2]], "inputs": {"x": 4}, "outputs": ["z"]}
PROGRAM["lines"] = [["ar", "y", ["x"], "dp"], ["own", "z", ["y"], "dp"]]


@pytest.fixture
def say(capsys, tmp_path, monkeypatch):
    """Runs the program in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        try:
            code = cli.main(" ".join(words).split())
        except SystemExit as end:
            code = end.code
        return (code, *capsys.readouterr())

    return run


def written(path, said):
    Path(path).write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def test_list_has_every_plan_and_what_could_not_be_imported(say, monkeypatch):
    registry.names()
    monkeypatch.setattr(registry, "found_elsewhere", lambda: ["plan bad (bad_module): RuntimeError: no"])
    code, out, _ = say("list")
    assert code == 0 and "could not be imported: plan bad (bad_module): RuntimeError: no" in out
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "][:-1] == list(registry.names())
    assert "ring           allreduce, reducescatter, allgather\n" in out


def test_verify_tells_steps_moves_and_order(say):
    code, out, _ = say("verify ring direct --ranks 8")
    told = "ring: allreduce on 8 ranks, 112 moves in 14 steps, 8 chunks, digest "
    assert code == 0 and told in out and "proved, chunks are added in different orders (not ordered)" in out
    assert "direct: " in out and "proved, ordered: all chunks are added in the order of ranks" in out
    code, out, _ = say("verify", written("mine.json", {**RING, "moves": RIGHT}), "--kind broadcast")
    assert code == 0 and out.startswith("mine: allreduce on 2 ranks, 2 moves in 2 steps, 1 chunk, ")
    code, out, err = say("verify", written("bad.json", {**RING, "moves": RIGHT[:1]}))
    assert code == 1 and not out
    assert err == "hvdlite-plan: bad.json: plan 'mine': in the end chunk 0 of rank 1 lacks what rank 0 gave [HVD001]\n"


def test_draw_writes_pictures_that_are_well_formed(say):
    assert say(f"draw trees --topology {DGX1P} --bytes 1M -o trees.svg --perfetto trees.json")[0] == 0
    arrows = [each for each in Xml.parse("trees.svg").iter() if each.tag.endswith("title")]
    spans = [row for row in json.loads(Path("trees.json").read_text()) if row["ph"] == "X"]
    assert len(arrows) == len(spans) == 480 and spans[0]["args"]["step"] == 0
    evil = plan.Table("<&\"'>", "allreduce", 2, 1, plan.make("ring", 1).moves)
    assert "<&" in Xml.fromstring(draw.svg(evil, 1, plan.Links.uniform(2, 0, 1))).findtext("{*}text")
    code, out, _ = say("draw ring --ranks 64")
    assert code == 0 and "8064 moves in 126 steps; the first 4000 are drawn" in out and Xml.fromstring(out) is not None


def test_a_drawn_pipeline_has_no_spans_of_a_lane_that_overlap():
    spans = [("F", 0, 0, 0.0, 1.0), ("send", 0, 0, 0.5, 2.0), ("send", 0, 1, 1.0, 3.0), ("sum", 0, 0, 2.5, 4.0)]
    rows = json.loads(draw.pipeline_rows(spans))[1:]
    assert [(row["tid"], row["ts"], row["dur"]) for row in rows] == [
        (0, 0, 1e3), (1, 500, 1500), (2, 1e3, 2e3), (1, 2500, 1500),
    ]  # fmt: skip
    assert [row["name"] for row in rows] == ["forward 0", "transfer 0", "transfer 1", "sum of gradients 0"]


def test_time_marks_the_fastest_of_each_size(say):
    code, out, _ = say("time ring halving direct --ranks 8 --links 20us,1GB/s --bytes 4k,16M")
    title, head, *rows = (line.split() for line in out.splitlines())
    assert code == 0 and head == ["plan", "4k", "16M"] and "20us,1GB/s," in title
    assert rows[0] == ["ring", "287.2", "us", "29.6", "ms"] and rows[2][2].endswith("*") and len(rows) == 3
    written("hosts.json", HOSTS)
    code, out, _ = say("time ring hierarchical --topology hosts.json --cursors rank --bytes 16MB")
    assert code == 0 and "4 ranks, links: hosts.json; cursors by rank" in out and out.count("*") == 2


@pytest.mark.parametrize(
    "said, text",
    [
        ("{", "not a plan: Expecting property name"),
        ("\ud83d", "file.json: "),
        ({**RING, "format": "2"}, "not a plan: its format is '2'"),
        ({**RING, "moves": [0] * (MOVES_MAX + 1)}, "not a plan: moves must be a list of at most 1048576"),
        ({**RING, "moves": [], "size": 1025}, "1025 ranks; a plan is for 1 to 1024"),
        ({**RING, "moves": [], "chunks": 1 << 23}, "8388608 chunks on 2 ranks are out of range"),
        ({**RING, "moves": [], "kind": "allsum"}, "kind 'allsum' is not one of"),
        ({**RING, "moves": [[0, 1, 2, 0, 1, 1]]}, "move 0 (step 0, src 1, dst 2, at 0, n 1, how 1) has a rank"),
        ({**RING, "moves": [[0, 1, 0, 1, 1, 1]]}, "outside 2 ranks and 1 chunks"),
        ({**RING, "moves": RIGHT, "name": "\x1b[31m"}, r"plan '\x1b[31m': a name has at most 64 printable"),
        ({**RING, "moves": RIGHT[::-1]}, "move 1 goes back to an earlier step"),
        (
            {**RING, "moves": [[0, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1]]},
            "step 0: rank 1 sends chunk 0 and writes it, too, maybe before it is sent: stage it, then fold",
        ),
    ],
)
def test_files_that_are_no_plans_are_named(say, said, text):
    if isinstance(said, str):
        Path("file.json").write_bytes(said.encode(errors="surrogatepass"))
    else:
        written("file.json", said)
    code, out, err = say("verify file.json")
    assert code == (1 if err.endswith("[HVD001]\n") else 2) and not out and err.count("\n") == 1
    assert err.startswith("hvdlite-plan: file.json: ") and text in err and "[HVD00" in err


@pytest.mark.parametrize(
    "said, text",
    [
        ("[]", "not a topology: its format is 'list'"),
        ({**GRAPH, "links": [[0, 1, 0]]}, "0 must be a number above zero [HVD004]"),
        ({**GRAPH, "links": [[0, 3, 1]]}, "3 is none of 3 ranks [HVD004]"),
        ({**GRAPH, "alpha_us": "5us"}, "'5us' must be a number"),
        ({**HOSTS, "hosts": [[0, 1], [1]]}, "list each rank from 0 on once [HVD004]"),
    ],
)
def test_topologies_that_are_none_are_named(say, said, text):
    code, _, err = say("time ring --topology", written("net.json", said))
    assert code == 2 and err.startswith("hvdlite-plan: net.json: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, text",
    [
        ("time ring --topology graph.json", "no link joins rank 2 to rank 0 in this topology [HVD004]"),
        (
            "verify ring --topology graph.json --ranks 4",
            "plan 'ring' is for 4 ranks, but the links are for 3 [HVD004]",
        ),
        ("verify right.json --ranks 3", "right.json: plan 'mine' is for 2 ranks, not for 3 [HVD009]"),
        ("draw trees --ranks 3", "plan 'trees' needs links that form a graph [HVD004]"),
        (
            "time ring --topology graph.json --links 1us,1gbit",
            "the network is given twice, by --links and by --topology",
        ),
        ("time ring --topology none.json", "No such file or directory: 'none.json' [HVD008]"),
        ("verify none.json", "none.json: [Errno 2]"),
        ("verify ring", "the number of ranks is missing: pass --ranks or --topology [HVD008]"),
        ("verify rung --ranks 2", "there is no plan 'rung'; there are aggregator, central, "),
        ("verify ring --ranks two", "argument --ranks: invalid int value: 'two'"),
        ("verify ring --ranks 0", "a plan is for 1 to 1024 ranks [HVD003]"),
        ("time ring --ranks 2 --links 20us,0gbit", "a rate of '0gbit' would never move a byte [HVD008]"),
        (
            "time ring --ranks 2 --links 20us,3furlongs",
            "'3furlongs' is not a rate: write it as 25gbit or 1GB/s",
        ),
        ("time ring --ranks 2 --bytes 4q", "'4q' is not a size"),
        ("time ring --ranks 2 --bytes 0", "a buffer of '0' is out of range"),
        ("time ring --ranks 2 --bytes 999999999T", "out of range: use 1 byte to 1024T [HVD008]"),
        ("draw ring --ranks 2 --bytes 1k,2k", "a picture shows one size"),
        ("draw ring --ranks 2 -o none/ring.svg", "No such file or directory: 'none/ring.svg' [HVD008]"),
        (
            "time grid --dims 100000,100000",
            "100000x100000 is not a grid of 1 to 6 dimensions and at most 1024",
        ),
        ("time grid --dims 2,2,2,2,2,2,2", "2x2x2x2x2x2x2 is not a grid of 1 to 6 dimensions"),
        ("time grid --dims 2,2 --parts 20000000", "20000000 parts of 16 moves each are out of range [HVD003]"),
        ("time ring --ranks 2 --links 20us,1gb/s", "write it as 1Gb/s, which are bits, or as 1GB/s, which are bytes"),
        ("time ring --topology " + "x" * 999, "File name too long: 'xxx"),
        ("sing", "invalid choice: 'sing'"),
    ],
)
def test_what_cannot_be_done_is_one_line(say, words, text):
    written("graph.json", GRAPH)
    written("right.json", {**RING, "moves": RIGHT})
    code, out, err = say(words)
    assert code == 2 and not out and err.startswith("hvdlite-plan: ") and text in err and len(err) < 400
    assert err.count("\n") == 1 and "[HVD00" in err[-10:]


def test_a_pipeline_is_cut_and_drawn(say):
    path = written("layers.json", LAYERS)
    code, out, _ = say("pipeline", path, "--ranks 4 --micro 8 --timeline p.json --rate 1kbit")
    assert code == 0 and "stage 3: layers d; ranks 1; forward 1.000 ms, backward 2.000 ms" in out
    assert "33.000 ms a step by the formula; 33.000 ms a step, played as 1F1B" in out
    spans = [row for row in json.loads(Path("p.json").read_text()) if row["ph"] == "X"]
    assert {"forward 7", "backward 7"} <= {row["name"] for row in spans} and max(r["ts"] for r in spans) <= 33e3
    code, out, _ = say("pipeline", path, "--ranks 1 --micro 1 --objective throughput")
    assert code == 0 and "stage 0: layers a to d; ranks 1" in out and "in steady state" in out


def test_auto_says_why_and_writes_the_plan(say):
    code, out, _ = say("auto", written("layers.json", LAYERS), "--ranks 2 --micro 4 --memory 1MB -o plan.json")
    plan = json.loads(Path("plan.json").read_text())
    assert code == 0 and out.startswith("dp=2 pp=1 tp=1: ") and "of 1e+06 bytes a rank" in out
    assert plan["format"] == "hvdlite-parallel-1" and plan["shape"] == {"dp": 2, "pp": 1, "tp": 1}


def test_a_profile_is_what_pipeline_reads(say, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(".")
    text = "import torch\ndef make():\n    return [torch.nn.Linear(4, 4), torch.nn.ReLU()], torch.ones(2, 4)\n"
    written("model_of_this_test.py", text)
    code, out, _ = say("profile model_of_this_test:make -o layers.json")
    assert code == 0 and out.splitlines()[1].split()[-2:] == ["32", "80"]
    assert say("pipeline layers.json --ranks 2 --micro 4")[0] == 0
    code, _, err = say("profile model_of_this_test:made -o layers.json")
    assert code == 2 and "model_of_this_test:made: AttributeError: " in err and err.endswith("[HVD005]\n")


def test_a_network_is_split_by_sizes_and_by_a_recording(say, monkeypatch):
    pytest.importorskip("scipy")
    code, out, _ = say("network --dims 4,4 --budget 100GB/s --sizes 100M")
    assert code == 0 and [line.split()[2] for line in out.splitlines()[1:3]] == ["80.000", "20.000"]
    assert "1.60 times as long" in out
    assert "66.667" in say("network --dims 4,4 --budget 100GB/s --sizes 100M,25M:1")[1]
    monkeypatch.setattr(recording, "load", lambda folder: SimpleNamespace(bytes=np.array([1e6, 3e6])))
    assert "80.000" in say("network --dims 4,4 --budget 100GB/s --recording recorded")[1]


def test_a_program_is_rewritten(say):
    path = written("program.json", PROGRAM)
    code, out, _ = say("rewrite", path, "--hosts 2 --ranks 2 -o better.json")
    assert code == 0 and "rule 9 own share of ar = rs\n    z = rs x over dp\n" in out and "0.3 MB before, 0.1 MB" in out
    assert json.loads(Path("better.json").read_text())["lines"] == [["rs", "z", ["x"], "dp"]]


@pytest.mark.parametrize(
    "words, text",
    [
        ("pipeline none.json --ranks 2 --micro 2", "No such file or directory: 'none.json' [HVD008]"),
        (
            "pipeline bad.json --ranks 2 --micro 2",
            "bad.json: layer 'b': weights is -1: it must be a number of at least 0",
        ),
        ("pipeline layers.json --ranks 2 --micro 0", "0 micro-batches: the number must be 1 to 4096 [HVD005]"),
        (
            "auto layers.json --ranks 2 --micro 2 --memory 1k",
            "fits into 1024 bytes of memory: the minimum is 8000 bytes [HVD005]",
        ),
        ("auto layers.json --ranks 0 --micro 2", "0 ranks: a plan is for 1 to 1024 [HVD008]"),
        ("auto zero.json --ranks 2 --micro 2", "the layers take no time, so no plan is faster than another [HVD005]"),
        ("auto layers.json --ranks 2", "the following arguments are required: --micro"),
        ("pipeline layers.json --ranks 2 --micro 2 --rate 0gbit", "a rate of '0gbit' would never move a byte [HVD008]"),
        ("profile no_such_module:make -o x.json", "no_such_module:make: ModuleNotFoundError: No module named"),
        ("network --dims 4,4 --budget 1GB/s", "--sizes or from --recording: pass one of them [HVD008]"),
        ("network --dims 4,4 --budget 1GB/s --sizes 1M --recording x", "pass one of them [HVD008]"),
        ("network --dims 4;4 --budget 1GB/s --sizes 1M", "write dimensions as 4,4 and sizes as 100M,25M:0+1 [HVD008]"),
        (
            "network --dims 4,4 --budget 1GB/s --sizes 1M:2",
            "over [2] of the dimensions [4, 4] is not possible",
        ),
        ("network --dims 4,4 --budget 1GB/s --recording none", "[HVD007]"),
        ("rewrite wrong.json --hosts 2", "wrong.json: line 2 (own z): there is no group 'tp'; there are dp [HVD006]"),
        ("rewrite layers.json --hosts 2", "layers.json: not a program: its format is 'hvdlite-layers-1'"),
        ("rewrite program.json --hosts 2 --ranks 4", "program.json: its axes make 2 ranks, not 4 [HVD006]"),
        ("rewrite program.json --hosts 3", "2 ranks cannot be divided evenly over 3 hosts [HVD008]"),
        ("rewrite noise.json --hosts 2", "noise.json: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_cannot_be_planned_is_one_line(say, words, text):
    written("layers.json", LAYERS)
    written("bad.json", {**LAYERS, "layers": [LAYER, {**LAYER, "name": "b", "weights": -1}]})
    written("zero.json", {**LAYERS, "layers": [{**LAYER, "forward_ms": 0, "backward_ms": 0, "weights": 0}]})
    written("program.json", PROGRAM)
    written("wrong.json", {**PROGRAM, "lines": [PROGRAM["lines"][0], ["own", "z", ["y"], "tp"]]})
    Path("noise.json").write_bytes(b"\xff")
    code, out, err = say(words)
    assert code == 2 and not out and err.startswith("hvdlite-plan: ") and text in err
    assert err.count("\n") == 1 and "[HVD00" in err[-10:]
