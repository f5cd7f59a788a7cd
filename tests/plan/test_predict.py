"""Predictions: what a recording says, that a play keeps to the formulas, what is printed, and bad recordings."""

import json
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from launching import launch

from hvdlite import predict
from hvdlite.predict.fit import Fit, fit
from hvdlite.trace import cli

MS = 1_000_000
JOB = str(Path(__file__).parents[2] / "examples/benchmarks/predictions.py")


def write(folder, size=2, steps=20, sizes=(1 << 20, 3 << 20), apart=True, late=0, lost=(), loss=None, other=0, **rest):
    """A recording as ranks write it: gradient i is ready 10 (i + 1) ms after a step's begin (rank 1: `late` ms later),
    its bucket takes 1 ms and 2 ns a byte, a step ends 5 ms behind the last. loss: one more tensor, 3 ms after the rank
    has waited for the others, and 5 ms before the end; "told": the timeline has that wait. other: an allgather that
    ranks wait for, so many ms. slow: the later half of steps takes so much longer, behind the last bucket. rough: a
    seed; neighbouring steps are alike, others differ by 5 %. divided: each two ranks have one
    model, whose halves are averaged by sets 1 and 2."""
    slow, rough, chance = rest.get("slow", 0), 0.0, random.Random(rest.get("rough"))
    job, cut = rest.get("job", "j"), rest.get("cut", 0)
    folder.mkdir(exist_ok=True)
    took = [1 * MS + 2 * s for s in sizes]
    for rank in range(size):
        head = {"format": "hvdlite-steps-1", "job": job, "epoch": 0, "rank": rank, "size": size, "host": "h",
                "clock": {"offset_ns": 0, "error_ns": 0}, "cores": 2, "local_size": 1 if apart else size,
                "fusion_threshold": 128 << 20}  # fmt: skip
        about = {"job": job, "epoch": 0, "rank": rank, "size": size, "host": f"h#{rank}", "clock_offset_ns": 0}
        rows = [{"ph": "M", "name": "hvdlite_timeline", "pid": rank, "tid": 0, "args": about}]
        of = {"set": rank % 2 + 1} if "divided" in rest else {}
        called = [f"pipe.grads_{i + 1}of9 (set {of['set']})" if of else f"g{i}" for i in range(len(sizes))]
        names = [{"ph": "M", "pid": rank, "tid": 1000 + i, "name": "thread_name", "args": {"name": called[i]}}
                 for i in range(len(sizes))]  # fmt: skip
        names.append({"ph": "M", "pid": rank, "tid": 900, "name": "thread_name", "args": {"name": "loss"}})
        lines, begin = [head], 10**12
        for number in range(1, steps + 1):
            free = begin
            for i, (s, ns) in enumerate(zip(sizes, took)):
                mine = begin + 10 * MS * (i + 1) + (late * MS if rank else 0)
                agreed = begin + 10 * MS * (i + 1) + late * MS
                begun = max(agreed, free)
                free = begun + ns
                row = {"pid": rank, "tid": 1000 + i}
                if (number, i) not in lost:
                    rows += [{**row, "ph": ph, "ts": ts / 1e3, **more} for ph, ts, more in (
                        ("B", mine, {"name": "NEGOTIATE_ALLREDUCE", "args": {"bytes": s}}), ("E", agreed, {}),
                        ("B", agreed, {"name": "ALLREDUCE", "args": of}), ("B", agreed, {"name": "QUEUE"}),
                        ("E", begun, {}), ("B", begun, {"name": "P2P_ALLREDUCE"}), ("E", free, {}), ("E", free, {}),
                    )]  # fmt: skip
            waits = int(free - begin - 10 * MS * len(sizes) - (late * MS if rank else 0)) + other * MS
            if loss:
                mine = begin + 10 * MS * len(sizes) + (late * MS if rank else 0)
                wait = {"pid": rank, "tid": 2}
                if loss == "told":
                    rows += [{**wait, "ph": "B", "ts": mine / 1e3, "name": f"g{len(sizes) - 1}"}]
                    rows += [{**wait, "ph": "E", "ts": free / 1e3}]
                free += 3 * MS
                rows += [{"pid": rank, "tid": 900, "ph": ph, "ts": ts / 1e3, **more} for ph, ts, more in (
                    ("B", free, {"name": "NEGOTIATE_ALLREDUCE", "args": {"bytes": 4}}), ("E", free, {}),
                    ("B", free, {"name": "ALLREDUCE"}), ("B", free, {"name": "VOTES_ALLREDUCE"}),
                    ("E", free + MS, {}), ("E", free + MS, {}),
                )]  # fmt: skip
                free, waits = free + MS, waits + MS
            if other:
                row = {"pid": rank, "tid": 901}
                rows += [{**row, "ph": "B", "ts": free / 1e3, "name": "NEGOTIATE_ALLGATHER", "args": {"bytes": 4}}]
                rows += [{**row, "ph": ph, "ts": free / 1e3, "name": "ALLGATHER"} for ph in "EB"]
                free += other * MS
                rows += [{**row, "ph": "E", "ts": free / 1e3}]
            end = free + 5 * MS
            rough = 0.7 * rough + chance.gauss(0, 0.036) if "rough" in rest else 0.0
            end += int((slow * (number > steps / 2) + max(-0.15, rough)) * (end - begin))
            lines.append({"step": number, "t": begin, "step_ns": end - begin, "exposed_ns": waits, "cpu_ns": 0,
                          "bytes": {"p2p" if apart else "shm": sum(sizes)}})  # fmt: skip
            begin = end
        text = "[\n" + ",\n".join(map(json.dumps, [*rows[:1], *names, *rows[1:]])) + "\n]"
        (folder / ("line.json" + (f".rank-{rank}.json" if rank else ""))).write_text(text[: len(text) - cut])
        (folder / f"rank-{rank}.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def told(capsys, *words):
    """(exit code, what was printed, what was complained)."""
    code = cli.main(["predict", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_recording_gives_ready_times_buckets_and_the_fit_that_made_them(tmp_path):
    job = predict.load(write(tmp_path / "r"))
    rec = job.recording
    assert (rec.size, rec.hosts, rec.names, rec.planes, rec.problems) == (2, 2, ["g0", "g1"], ("p2p",), [])
    assert np.allclose(rec.ready, [10 * MS, 20 * MS]) and np.allclose(rec.tail, 5 * MS) and len(rec.ready) == 2 * 15
    assert job.fit.a == pytest.approx(1 * MS, rel=1e-6) and job.fit.b == pytest.approx(2, rel=1e-6)
    assert rec.cpu == 0 and np.allclose(rec.rounds, 0, atol=1)


@pytest.mark.parametrize("n", [2, 4, 64])
@pytest.mark.parametrize("medium", ["own", "bus"])
def test_a_step_is_what_the_formula_of_its_medium_says(tmp_path, n, medium):
    """Both buckets by hand: the second begins when it is ready or when the first is over."""
    job = predict.load(write(tmp_path / "r"))
    each = {"own": 2 * (n - 1) / n, "bus": n - 1}[medium]
    late = 1 + 2 * (n - 2) * 5e-3  # each further host costs two messages of 5 us
    first, second = (late + each * 2e-6 * s for s in (1 << 20, 3 << 20))
    want = max(20, 10 + first) + second + 5
    said = job.step(n, medium=medium)
    assert said.ms == pytest.approx(want, rel=1e-3) and said.low <= said.ms <= said.high
    assert said.exposed_ms == pytest.approx(want - 25, rel=1e-3) and said.alone_ms == pytest.approx(25, rel=1e-3)
    assert job.step(n, medium=medium, seed=3) == job.step(n, medium=medium, seed=3)
    half = late + each * 1e-6 * (1 << 20), late + each * 1e-6 * (3 << 20)
    want = max(20, 10 + half[0]) + half[1] + 5
    assert job.step(n, medium=medium, wire="fp16").ms == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("wire, share", [("int8", 260 / 1024), ("int4", 132 / 1024)])
def test_int8_and_int4_make_fewer_bytes_between_hosts_alone(tmp_path, wire, share):
    """By hand: fewer bytes over the link, 0.3 ns of coding a byte, one agreement more, three with a reduce inside."""
    size = 3 << 20
    job = predict.load(write(tmp_path / "r"))
    for n in (2, 16):
        said = job.step(n, wire=wire, link="1gbit,100us")
        late = 0.2 + 2 * (n - 2) * 5e-3  # each further host costs two messages of 5 us
        bytes_ms = (2 * (n - 1) / n * 8e-6 * share + 0.3e-6) * size
        assert said.ms == pytest.approx(20 + late + bytes_ms + 5, rel=1e-3)
        assert said.confidence == "low" and "0.3 ns for each byte of float32: not measured" in said.notes[-1]
        assert said.ms < job.step(n, wire="fp16", link="1gbit,100us").ms
    memory = predict.load(write(tmp_path / "shm", apart=False))
    memory.recording.rounds[:, 0] = 0.5 * MS
    inside, alone = 1 + 2e-6 * size, memory.step(2, wire=wire)
    assert alone.ms == memory.step(2).ms and "changes nothing on one host" in alone.notes[-1]
    whole, small = (memory.step(4, hosts=2, link="1GB/s,100us", wire=each) for each in ("none", wire))
    assert whole.ms - small.ms == pytest.approx((1 - share - 0.3) * 1e-6 * size - 3 * 0.5, abs=0.02)
    assert small.ms == pytest.approx(20 + 4 * 0.5 + inside + 0.2 + (share + 0.3) * 1e-6 * size + 5, rel=1e-3)


def test_other_networks_other_layouts_other_batches_and_late_ranks(tmp_path):
    job = predict.load(write(tmp_path / "r"))
    said = job.step(4, link="1GB/s,100us")  # 2 alpha and 2 (n - 1) / n ns a byte
    assert said.ms == pytest.approx(20 + 0.2 + 0.02 + 1.5e-6 * (3 << 20) + 5, rel=1e-3)
    assert said.confidence == "low" and "was not measured" in said.notes[-1]
    assert job.step(1, batch=3.0).ms == pytest.approx(3 * 20 + 5, rel=1e-3)  # the optimizer's part stays
    memory = predict.load(write(tmp_path / "shm", apart=False))
    assert memory.step(2).ms == pytest.approx(20 + 1 + 2e-6 * (3 << 20) + 5, rel=1e-3)
    crowded = memory.step(4)  # 2 processors: copies take twice as long
    assert crowded.ms == pytest.approx(20 + 2 * (1 + 2e-6 * (3 << 20)) + 5, rel=1e-3)
    assert "more ranks than processors: not measured" in crowded.notes[-1] and crowded.confidence == "low"
    two = memory.step(4, hosts=2, link="1GB/s,100us")  # inside by the fit, across by the link
    assert two.ms == pytest.approx(20 + 1 + 2e-6 * (3 << 20) + 0.2 + 1e-6 * (3 << 20) + 5, rel=1e-3)
    late = predict.load(write(tmp_path / "late", late=30))
    assert late.step(8).bound == "late ranks" and late.step(8).late_ms > 10
    fitted = fit(late.recording.buckets)  # from the last rank's begin: waiting is no transfer
    assert (fitted.a, fitted.b) == pytest.approx((1 * MS, 2), rel=1e-6)


@pytest.mark.parametrize("loss", ["told", "not told"])
def test_what_a_script_waits_for_within_a_step_is_no_computing(tmp_path, loss):
    """A loss that is averaged behind the gradients: it comes as much sooner as they do."""
    job = predict.load(write(tmp_path / "r", sizes=(1 << 20, 16 << 20), loss=loss))
    first, last = job.recording.phases
    assert first[:2] == ([0, 1], []) and last.members == [2] and 1 in last.after
    assert np.allclose(job.recording.ready, [10 * MS, 20 * MS, 23 * MS]) and not job.recording.doubts
    sums = 1 + 2e-6 * (16 << 20)
    assert job.step(2).ms == pytest.approx(20 + sums + 3 + 5, abs=1.1)
    assert job.step(1).ms == pytest.approx(20 + 3 + 5, abs=1.1)
    assert job.step(2, wire="fp16").ms == pytest.approx(20 + 1 + (sums - 1) / 2 + 3 + 5, abs=1.1)


def test_what_is_not_played_is_said(tmp_path):
    said = predict.load(write(tmp_path / "r", other=9)).step(8)
    assert any("each step also has allgather" in note for note in said.notes) and said.confidence == "low"
    some = write(tmp_path / "some")
    (some / "line.json").write_text((some / "line.json").read_text().replace('"g1"', '"mine"'))
    assert "'g1'" in predict.load(some).step(8).notes[-1]


def test_a_recording_whose_steps_differ_says_so(tmp_path):
    write(tmp_path / "r", steps=40, slow=0.3)
    said = predict.load(tmp_path / "r").step(2)
    assert "recorded steps differ by 23%" in said.notes[0] and "more steps" in said.notes[0]
    assert said.low < 33 < 41.9 < said.high  # either half may be what another run is like
    write(tmp_path / "steady", steps=40, slow=0.1)
    said, steady = said.confidence, predict.load(tmp_path / "steady").step(2)
    assert (said, steady.confidence, steady.notes) == ("medium", "high", [])


def test_nine_of_ten_other_runs_lie_in_the_range(tmp_path):
    runs = [predict.load(write(tmp_path / f"{seed}", steps=40, rough=seed)) for seed in range(20)]
    said = [run.step(2) for run in runs]
    took = [run.recording.step_ns.mean() / MS for run in runs]
    inside = sum(one.low <= other <= one.high for one, other in zip(said, took[1:] + took[:1]))
    assert inside >= 18 and np.mean([(one.high - one.low) / one.ms for one in said]) < 0.15
    far = runs[0].step(2, batch=2.0)  # what was not measured makes it wider
    assert (far.high - far.low) / far.ms > 1.5 * (said[0].high - said[0].low) / said[0].ms


def test_what_held_up_a_small_bucket_is_not_multiplied_for_a_large_one():
    found = Fit(1.0, 1.0, {(9, True): [1.0, 101.0], (10_000, False): [1.5]})
    assert found.like(9, True) == [1.0, 101.0] and found.like(10_000, True) == [1.5]
    assert found.like(99, True) == pytest.approx([1.0, 1 + 100 * 10 / 100])


def test_an_optimizer_of_one_rank_submits_nothing_and_its_steps_count(tmp_path):
    alone = write(tmp_path / "alone", size=1, sizes=())
    job = predict.load(write(tmp_path / "r"), alone)  # computes for 5 ms in place of 25
    want = max(4, 2 + 1 + 2e-6 * (1 << 20)) + 1 + 2e-6 * (3 << 20) + 1
    assert job.step(2).ms == pytest.approx(want, rel=1e-3)
    assert predict.load(alone).step(1).ms == pytest.approx(5)
    with pytest.raises(predict.RecordingError, match="recorded on one rank"):
        predict.load(alone).step(4, link="1GB/s,20us")


def test_a_divided_model_counts_by_its_copies(tmp_path, capsys):
    job = predict.load(write(tmp_path / "r", size=4, late=3, divided=True))
    rec, took = job.recording, 23 + 1 + 2e-6 * (3 << 20) + 5
    assert (rec.size, rec.of_copy, rec.names, int(rec.bytes[0])) == (2, 2, ["gradients of all stages"], 8 << 20)
    same, more = job.step(4), job.step(8)
    assert same.ranks == 4 and same.ms == pytest.approx(took, rel=1e-3) and same.confidence == "medium"
    assert "2 ranks of a copy" in " ".join(same.notes) and same.alone_ms == pytest.approx(23 + 5, rel=1e-3)
    assert more.ms == pytest.approx(23 + 1.5 * (1 + 2e-6 * (3 << 20)) + 5, rel=1e-3)  # 2 (n - 1) / n, n copies
    code, out, err = told(capsys, tmp_path / "r", "--ranks", "5")
    assert code == 2 and "5 ranks: a copy of the recorded model has 2, pass a multiple" in err
    with pytest.raises(predict.RecordingError, match="record two copies"):
        predict.load(write(tmp_path / "one", size=2, divided=True))


def test_an_algorithm_of_hvdlite_plan_takes_the_formulas_place(tmp_path):
    job = predict.load(write(tmp_path / "r", sizes=(1 << 20, 16 << 20)))
    ring, central = (job.step(8, link="1GB/s,20us", plan=name).ms for name in ("ring", "central"))
    assert ring == pytest.approx(20 + 14 * (0.02 + 2 * 1.048576) + 5, rel=0.02)
    assert central > 4 * ring


def test_the_program_says_rows_notes_advice_json_timeline_and_what_a_larger_job_took(tmp_path, capsys):
    write(tmp_path / "r")
    write(tmp_path / "larger", size=4)
    code, out, _ = told(
        capsys, tmp_path / "r", "--ranks", "2,4", "--wire", "none,fp16", "--compare", tmp_path / "larger"
    )
    assert code == 0 and "recorded: 2 ranks on 2 hosts, 2 gradients of 4.19 MB" in out
    assert sum(line.split()[:1] in (["2"], ["4"]) for line in out.splitlines()) >= 4
    assert "no network is faster than" in out and "--medium bus" in out and "measured: 4 ranks took 32.29 ms" in out
    line = tmp_path / "out.json"
    code, out, _ = told(
        capsys, tmp_path / "r", "--ranks", "64", "--json", "--timeline", line, "--svg", tmp_path / "a.svg"
    )
    assert ElementTree.fromstring((tmp_path / "a.svg").read_text()).tag.endswith("svg")
    said = json.loads(out)
    assert said["predicted"][0]["ranks"] == 64 and said["recorded"]["bytes"] == 4 << 20
    assert {"step", "waits"} <= {row["name"] for row in json.loads(line.read_text()) if row["ph"] == "X"}
    words = (tmp_path / "r", "--ranks", "2,4", "--sync-every", "1,10", "--timeline", line, "--svg", tmp_path / "a.svg")
    code, own, err = told(capsys, *words)
    assert code == 0 and "sync every" in own and "sync every" not in out and own.count("with sync_every above 1") == 1
    assert ", every 10" in (tmp_path / "a.svg").read_text() and '"10 steps"' in line.read_text()
    said = json.loads(told(capsys, *words[:5], "--json")[1])["predicted"]
    assert [(p["ranks"], p["sync_every"]) for p in said] == [(2, 1), (2, 10), (4, 1), (4, 10)]
    code, _, err = told(capsys, *words[:5], "--compare", tmp_path / "larger")
    assert code == 2 and "leave out --compare or --sync-every" in err


def mixed(folder, name):
    """That file is another job's."""
    write(folder.parent / "other", job="k")
    (folder.parent / "other" / name).rename(folder / name)


def clockless(folder):
    steps = folder / "rank-1.steps.jsonl"
    steps.write_text(steps.read_text().replace('{"offset_ns": 0, "error_ns": 0}', "null"))


BAD = {
    "no steps": (lambda f: [p.unlink() for p in f.glob("*.jsonl")], "hvdlite-run --record"),
    "no timeline": (lambda f: (f / "line.json").unlink(), "line.json is missing"),
    "one rank missing": (lambda f: (f / "rank-1.steps.jsonl").unlink(), "the steps of rank 1 of 2 are not in it"),
    "two jobs": (lambda f: mixed(f, "rank-1.steps.jsonl"), "rank 0 of 2 are not in it"),
    "timeline of another job": (lambda f: mixed(f, "line.json"), "is of another job"),
    "few steps": (lambda f: write(f, steps=8), "record at least 15 steps"),
    "no gradients": (
        lambda f: write(f, sizes=(1 << 20,), lost={(n, 0) for n in range(8, 20)}),
        "no tensor is",
    ),
    "no clock": (clockless, "rank 1 could not compare its clock"),
    "hostile": (lambda f: (f / "line.json").write_text("[" * 100000), "neither a timeline"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_recording_that_is_bad_is_named_with_the_reason(tmp_path, capsys, case):
    spoil, reason = BAD[case]
    folder = write(tmp_path / "r")
    spoil(folder)
    code, out, err = told(capsys, folder)
    assert code == 2 and not out and str(folder) in err and reason in err and err.rstrip().endswith("[HVD007]")


def test_a_timeline_that_was_cut_or_has_lost_events_counts_as_far_as_it_goes(tmp_path):
    cut = predict.load(write(tmp_path / "cut", cut=300))
    assert len(cut.recording.step_ns) == 14 and "1 of 15 steps lack a gradient" in cut.recording.problems[-1]
    holed = predict.load(write(tmp_path / "holed", lost={(9, 0)}))
    assert len(holed.recording.step_ns) == 14 and holed.step(4).ms > 0


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "0"), ("--ranks", "2.5"), ("--ranks", "many"), ("--wire", "int2"), ("--link", "25gbit"),
        ("--link", "0gbit,1us"), ("--link", "25gbit,20miles"), ("--batch", "-1"), ("--fusion-mb", "x"),
        ("--hosts", "0"), ("--plan", "ring"), ("--ranks", "20000"), ("--ranks", "inf"),
        ("--hosts", "1", "--link", "1gbit,1us"), ("--plan", "ring", "--hosts", "2", "--link", "1gbit,1us"),
        ("--plan", "ring", "--link", "1gbit,1us", "--wire", "int8"), ("--sync-every", "0"), ("--sync-every", "-1"),
        ("--sync-every", "1.5"), ("--sync-every", "1000000000"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_are_refused(tmp_path, capsys, words):
    code, out, err = told(capsys, write(tmp_path / "r"), *words)
    assert code == 2 and not out and err.rstrip().endswith("[HVD008]")


def test_a_real_job_is_recorded_by_one_flag_and_predicted(tmp_path, capsys):
    """Two ranks that are hosts of their own; its own size is predicted about as it was."""
    folder = tmp_path / "r"
    words = ["job", "--apart", "--sleep-ms", "1", "--layers", "4", "--kilobytes", "256", "--steps", "20"]
    code, _, err = launch("-np", "2", "--record", str(folder), sys.executable, JOB, *words)
    assert code == 0, err
    code, out, err = told(capsys, folder, "--ranks", "2,8", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["recorded"]["gradients"] == 4 and said["recorded"]["bytes"] == 1 << 20
    assert said["predicted"][0]["ms"] == pytest.approx(said["recorded"]["ms"], rel=0.3)
    code, _, err = launch("-np", "2", "--record", str(folder), "--trace-dir", "x", sys.executable, "-c", "0")
    assert code == 2 and "[HVD703]" in err
