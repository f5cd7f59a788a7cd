"""Pictures of what run_all.py measured: bandwidth over size, time over ranks, and what a training step is made of.

Each is drawn as PNG and as SVG (text stays text) from launches in the state of the machine that was met most often; the
state stands below. Nothing is smoothed: points are medians over launches, bars reach from the lowest to the highest.
Needs matplotlib, which is imported when something is drawn.
"""

import statistics
from pathlib import Path

from table import by_state, cells, is_peer

COLORS = {
    "hvdlite, plane memory": "#0b5d3b",
    "hvdlite": "#2ca25f",
    "openmpi": "#d95f02",
    "openmpi, malloc tuned": "#fdae6b",
    "mpich": "#7570b3",
    "mpich, malloc tuned": "#bcbddc",
    "gloo": "#888888",
    "horovod": "#c51b7d",
}
CALLED = {"openmpi": "Open MPI 5", "mpich": "MPICH 5", "gloo": "Gloo (torch)", "horovod": "Horovod"}
PARTS_OF_STEP = (("computing", "#c7d9e8"), ("exposed communication", "#e07b39"), ("of it negotiation", "#7a1f1f"))
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def label(column: str) -> str:
    first, comma, rest = column.partition(",")
    return CALLED.get(first, first) + comma + rest


def bytes_of(work: str) -> int:
    """Of `... 64 KB`."""
    number, unit = work.split()[-2:]
    return int(number) * UNITS[unit]


def most_met(records: "list[dict]", part: str) -> "tuple[str, dict[int, dict]]":
    """The state of the machine with most launches of this part; figures by number of ranks."""
    groups, _ = by_state(records)
    of_part = {(ranks, state): found for (name, ranks, state), found in groups.items() if name == part}
    launches: dict = {}
    for (_, state), found in of_part.items():
        launches[state] = launches.get(state, 0) + len(found)
    if not launches:
        return "", {}
    best = max(launches, key=launches.__getitem__)
    return best, {ranks: cells(found) for (ranks, state), found in sorted(of_part.items()) if state == best}


def columns_of(*found: dict) -> "list[str]":
    present = {column for one in found for _, column in one}
    return [column for column in COLORS if column in present]


def finish(figure, folder: Path, name: str, below: str) -> None:
    """Write both files."""
    figure.text(0.01, 0.005, below, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03 if name != "ranks" else 0.1, 1, 1))
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def draw_bandwidth(plot, records: "list[dict]", folder: Path, below: str) -> None:
    """GB/s of the tensor's bytes over its size, a panel for each number of ranks."""
    state, by_ranks = most_met(records, "plane")
    from_python = most_met(records, "calls")[1]
    if not by_ranks:
        return
    figure, panels = plot.subplots(1, len(by_ranks), figsize=(5.2 * len(by_ranks), 4.2), squeeze=False)
    for panel, (ranks, found) in zip(panels[0], by_ranks.items()):
        called = from_python.get(ranks, {})
        gloo = {
            (work, who): called[work, who] for work, who in called if is_peer(who) and work.startswith("allreduce_")
        }
        for column in columns_of(found, gloo):
            points = [(bytes_of(work), values) for (work, who), values in {**gloo, **found}.items() if who == column]
            points = sorted((size, values) for size, values in points if size >= 4096)
            speeds = [[size / 1e3 / us for us in sorted(values)] for size, values in points]
            middle = [statistics.median(speed) for speed in speeds]
            spread = [[m - min(s) for m, s in zip(middle, speeds)], [max(s) - m for m, s in zip(middle, speeds)]]
            style = {"color": COLORS[column], "marker": "o", "markersize": 3.5, "linewidth": 1.6, "capsize": 2}
            line = "--" if is_peer(column) else "-"
            name = label(column) + (", from Python" if column in ("gloo", "horovod") else "")
            panel.errorbar([size for size, _ in points], middle, yerr=spread, linestyle=line, label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks([UNITS["KB"] * 4**i for i in range(1, 9)])
        panel.set_xticklabels(["4 KB", "16", "64", "256", "1 MB", "4", "16", "64"])
        panel.set_title(f"allreduce of float32, {ranks} ranks")
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panels[0][0].set_ylabel("GB/s (bytes of the tensor / time)")
    panels[0][0].legend(fontsize=7, frameon=False)
    finish(figure, folder, "bandwidth", f"{below}; {state}")


def draw_ranks(plot, records: "list[dict]", folder: Path, below: str) -> None:
    """Microseconds over the number of ranks, a panel for each of three sizes."""
    state, by_ranks = most_met(records, "plane")
    if len(by_ranks) < 2:
        return
    works = [f"allreduce float32 {size}" for size in ("4 KB", "1 MB", "128 MB")]
    figure, panels = plot.subplots(1, len(works), figsize=(10.4, 4.0), squeeze=False)
    for panel, work in zip(panels[0], works):
        for column in columns_of(*by_ranks.values()):
            points = [(n, found[work, column]) for n, found in by_ranks.items() if (work, column) in found]
            middle = [statistics.median(values) for _, values in points]
            line = "--" if is_peer(column) else "-"
            panel.plot(
                [n for n, _ in points],
                middle,
                line,
                marker="o",
                markersize=4,
                color=COLORS[column],
                label=label(column),
            )
        panel.set_yscale("log")
        panel.set_xticks(list(by_ranks))
        panel.set_xlabel("ranks")
        panel.set_title(work.removeprefix("allreduce float32 "))
        panel.grid(True, color="#dddddd", linewidth=0.6)
    panels[0][0].set_ylabel("microseconds of an allreduce")
    figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=3, fontsize=7, frameon=False, loc="lower right")
    finish(figure, folder, "ranks", f"{below}; {state}")


def draw_step(plot, records: "list[dict]", folder: Path, below: str) -> None:
    """Milliseconds of a step of ResNet-50: computing, exposed communication, and how much of that is negotiation."""
    state, by_ranks = most_met(records, "step")
    if not by_ranks:
        return
    bars = [(ranks, column, found) for ranks, found in by_ranks.items() for column in reversed(columns_of(found))]
    figure, panel = plot.subplots(figsize=(9, 1.3 + 0.5 * len(bars)))
    for place, (_, column, found) in enumerate(reversed(bars)):
        alone, exposed, negotiation = (
            statistics.median(found.get((work, column), [0.0]))
            for work in ("step alone", "exposed communication", "  of it negotiation")
        )
        negotiation, exposed = min(negotiation, max(exposed, 0)), max(exposed, 0)
        start = 0.0
        for (_, color), width in zip(PARTS_OF_STEP, (alone, exposed - negotiation, negotiation)):
            panel.barh(place, width, left=start, color=color, height=0.6)
            start += width
        panel.text(start, place, f"  {start:.0f} ms, {exposed:.1f} exposed", va="center", fontsize=8)
    names = {"gloo": "DistributedDataParallel, Gloo"}
    panel.set_yticks(range(len(bars)))
    panel.set_yticklabels([f"{names.get(column, label(column))}, {n} ranks" for n, column, _ in reversed(bars)])
    panel.set_xlim(0, 1.3 * panel.get_xlim()[1])
    panel.set_xlabel("milliseconds of a training step, ResNet-50, 64 x 64 pixels, batch 2 per rank")
    patches = [plot.Rectangle((0, 0), 1, 1, color=color) for _, color in PARTS_OF_STEP]
    names_of_parts = [name for name, _ in PARTS_OF_STEP]
    panel.legend(patches, names_of_parts, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    panel.spines[["top", "right"]].set_visible(False)
    finish(figure, folder, "step", f"{below}; {state}")


def draw(records: "list[dict]", folder: Path) -> None:
    """All pictures that there are figures for. SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('pictures need matplotlib: pip install "hvdlite[bench]" or matplotlib alone') from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hvdlite", "font.size": 9})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    machines = [record["machine"] for record in records if "machine" in record]
    below = f"{machines[-1]['processor']}, commit {machines[-1]['commit']}" if machines else ""
    for one in (draw_bandwidth, draw_ranks, draw_step):
        one(pyplot, records, folder, below)
        pyplot.close("all")
