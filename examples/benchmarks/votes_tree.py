"""What do votes cost as a job grows? Bytes, rounds and time of a step for 2 to 10,000 ranks, simulated and drawn.

    python examples/benchmarks/votes_tree.py [--most 10000] [--pictures examples/benchmarks/pictures]

The simulation (tests/c/sim_hosts.c) lets every rank's coordinator vote over the engine's own tree of hosts, 8 ranks a
host, 161 gradients a step; a message takes 25 us and 1 ns a byte, computing takes none. So bytes and rounds are those
of a real job, and the time is what its messages need at least. Steps: the first (all tensors are new), the second (a
bit each), one that is learned, the same with the gradients coming over 100 ms, one where a rank has another shape.

Needs make and a C compiler; matplotlib for --pictures.
"""

import argparse
import csv
import io
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COLORS = {
    "first": "#7570b3",
    "mismatch": "#d95f02",
    "second": "#2ca25f",
    "learned": "#0b5d3b",
    "learned over 100 ms": "#888888",
}
CALLED = {
    "first": "first step: 161 new names",
    "mismatch": "a rank with another shape",
    "second": "second step: a bit each",
    "learned": "learned",
    "learned over 100 ms": "learned, gradients over 100 ms",
}


def simulated(most: int) -> "list[dict[str, str]]":
    """One record for each number of ranks and kind of step."""
    program = ROOT / "tests/out/plain/tests/c/bench_votes_tree"
    subprocess.run(["make", "-s", "-C", str(ROOT / "tests"), f"-j{os.cpu_count()}", str(program)], check=True)
    run = subprocess.run([str(program), str(most)], check=True, stdout=subprocess.PIPE, text=True)
    return list(csv.DictReader(io.StringIO(run.stdout)))


def table(records: "list[dict[str, str]]") -> str:
    """The records in columns."""
    rows = [list(records[0])] + [list(record.values()) for record in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def draw(records: "list[dict[str, str]]", folder: Path) -> None:
    """Three panels over the number of ranks: bytes of the busiest host, of all, and time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hvdlite", "font.size": 9})
    from matplotlib import pyplot

    columns = ("bytes of the busiest host", "bytes", "us after the last submission")
    titles = (
        "KB a step at the busiest host",
        "KB a step on all streams of votes",
        "ms from the last gradient to the plan",
    )
    figure, panels = pyplot.subplots(1, 3, figsize=(12.6, 4.2))
    for panel, column, title in zip(panels, columns, titles):
        for step, color in COLORS.items():
            points = [(int(each["ranks"]), float(each[column]) / 1000) for each in records if each["step"] == step]
            panel.plot(*zip(*points), marker="o", markersize=3.5, color=color, label=CALLED[step])
        panel.set_xscale("log")
        panel.set_yscale("linear" if column.startswith("us") else "log")
        panel.set_xlabel("ranks, 8 a host (below 16 on two hosts)")
        panel.set_title(title)
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panels[2].legend(fontsize=7, frameon=False, loc="upper left")
    spread = ", ".join(
        f"{each['ranks']}: {each['rounds']}" for each in records if each["step"] == "learned over 100 ms"
    )
    figure.text(
        0.01,
        0.005,
        "Simulated: 161 gradients, 25 us and 1 ns a byte for a message. One round a step, 3 where a rank has another "
        f"shape;\nwhere gradients come over 100 ms and nothing is held back, by ranks, {spread}",
        fontsize=7,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(folder / "votes_tree.png", dpi=110, metadata={"Software": None})
    figure.savefig(folder / "votes_tree.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=10000, help="ranks of the largest job")
    parser.add_argument("--pictures", type=Path, help="draw into this folder (needs matplotlib)")
    args = parser.parse_args()
    records = simulated(args.most)
    print(table(records))
    if args.pictures:
        draw(records, args.pictures)


if __name__ == "__main__":
    main()
