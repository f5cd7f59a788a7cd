"""What launches say together: tables by part and number of ranks, states of the machine apart, ratios, bars.

On a virtual machine the distance between two processors changes within seconds, outside our control, and with it
everything that ranks exchange. So a launch counts for the state in which the machine was before and after it. States
are found in the probes themselves: sorted, they fall into groups, one ends where the next probe is 1.4 times as large.
A launch whose two probes are in different groups straddles a change and is dropped, one with a probe of 400 ns or more
was disturbed and is dropped, too; both are counted. A group is called near below 110 ns, far from 200 ns, else between.

A figure is the median over launches of their medians, with the lowest and the highest of these beside it.
"""

import statistics

STEP, DISTURBED_NS = 1.4, 400
UNKNOWN, DISTURBED = "state unknown", "all launches were disturbed or straddled a change: not to be quoted"

Cell = "dict[tuple[str, str], list[float]]"  # (work, column): one median per launch


def is_peer(column: str) -> bool:
    return not column.startswith("hvdlite") and column != "bare Python"


def state_limits(records: "list[dict]") -> "list[tuple[float, str]]":
    """(first probe of a group, its name), ascending."""
    probes = sorted(ns for r in records for ns in (r["before"], r["after"]) if ns is not None and ns < DISTURBED_NS)
    groups: list[list[float]] = []
    for ns in probes:
        if groups and ns <= STEP * groups[-1][-1]:
            groups[-1].append(ns)
        else:
            groups.append([ns])
    named = []
    for group in groups:
        middle = statistics.median(group)
        name = "near" if middle < 110 else "far" if middle >= 200 else "between"
        named.append((group[0], f"{name}, {group[0]:.0f} to {group[-1]:.0f} ns"))
    return named


def state_of(record: dict, limits: "list[tuple[float, str]]") -> "str | None":
    """The state of a launch, None if it is dropped."""
    probes = (record["before"], record["after"])
    if None in probes:
        return UNKNOWN
    if max(probes) >= DISTURBED_NS:
        return None
    states = {[name for first, name in limits if ns >= first][-1] for ns in probes}
    return states.pop() if len(states) == 1 else None


def cells(records: "list[dict]") -> Cell:
    """Figures by work and column, in the order in which they came."""
    found: dict = {}
    for record in records:
        for result in record["results"]:
            found.setdefault((result["work"], result["column"]), []).append(result["median"])
    return found


def by_state(records: "list[dict]") -> "tuple[dict[tuple[str, int, str], list[dict]], int]":
    """Launches that count, by part, ranks and state; and how many were dropped."""
    launches = [record for record in records if "part" in record and not record["failed"]]
    limits, groups, dropped = state_limits(launches), {}, 0
    for record in launches:
        state = state_of(record, limits)
        if state is None:
            dropped += 1
        else:
            groups.setdefault((record["part"], record["ranks"], state), []).append(record)
    if launches and not groups:  # better than nothing, and said
        for record in launches:
            groups.setdefault((record["part"], record["ranks"], DISTURBED), []).append(record)
    return groups, dropped


def bar_of(work: str, column: str, ranks: int, state: str) -> "tuple[str, float] | None":
    """What is asked for: ("at most", figure) or ("times the best peer", ratio); no others are set."""
    if work.startswith("allreduce float32") and ranks == 2:  # beside the best peer, tuned or not
        size = work.removeprefix("allreduce float32 ")
        if column.endswith("plane memory"):
            if size not in ("1 MB", "4 MB", "16 MB", "32 MB", "128 MB"):
                return None
            return ("ratio", 3.0 if state.startswith("near") and size in ("1 MB", "16 MB") else 2.0)
        return ("ratio", 1.5 if size in ("16 MB", "32 MB", "128 MB") else 1.0)
    if work in ("allreduce_ of 4 B", "allreduce_ of 4 KB"):
        return ("at most", 15.0 if ranks == 2 else 60.0)
    at_most = {
        "100 x 64 KB async": 1000.0,
        "161 gradients of ResNet-50": 12.0,
        "gradient hook, by the clock": 1.0,
        "gradient hook, its thread's processor time": 1.0,
        "idle job: threads of the busiest rank": 1.0,
        "import hvdlite beyond numpy": 50.0,
        "start two ranks that call init()": 400.0,
    }
    if work in at_most and ranks == 2:
        return ("at most", at_most[work])
    return ("ratio", 4.0) if work == "exposed communication" and ranks == 2 else None


def as_shipped(peers: "dict[str, float]", figure: float) -> str:
    """The second bar of 128 MB: twice as fast as a peer whose malloc is not tuned."""
    shipped = min((peer for peer in peers if "tuned" not in peer), key=peers.__getitem__, default=None)
    if shipped is None:
        return ""
    ratio = peers[shipped] / figure
    return f"; {ratio:.2f} x of {shipped} as shipped, 2 x {'yes' if ratio >= 2 else 'NO'}"


def ratio_text(found: Cell, work: str, column: str, ranks: int, state: str) -> str:
    """How many times as long the best peer takes, the bar, and whether it is met."""
    figure = statistics.median(found[work, column])
    peers = {peer: statistics.median(values) for (of, peer), values in found.items() if of == work and is_peer(peer)}
    text, bar = "", bar_of(work, column, ranks, state)
    best = min(peers, key=peers.__getitem__, default=None)
    ratio = peers[best] / figure if best and figure > 0 else None
    if ratio is not None:
        text = f"{ratio:7.2f} x of {best}"
    if bar is None or (bar[0] == "ratio" and ratio is None):
        return text
    met = ratio >= bar[1] if bar[0] == "ratio" else figure <= bar[1]
    wanted = f"{bar[1]:g} x" if bar[0] == "ratio" else f"<= {bar[1]:g}"
    verdict = f"{text:38} {wanted:>8} {'yes' if met else 'NO'}"
    return verdict + (as_shipped(peers, figure) if (work, column) == ("allreduce float32 128 MB", "hvdlite") else "")


def line(found: Cell, work: str, column: str, unit: str, ranks: int, state: str) -> str:
    values = found[work, column]
    figures = f"{statistics.median(values):10.2f} {min(values):10.2f} {max(values):10.2f} {unit:11} {len(values):3}"
    text = f"{work:44} {column:24} {figures}"
    return text if is_peer(column) else f"{text}  {ratio_text(found, work, column, ranks, state)}".rstrip()


def halves(found: Cell) -> "list[str]":
    """16-bit floats beside as many float32: 16 MB beside 32 MB."""
    lines = []
    for column in sorted({column for _, column in found}):
        whole = found.get(("allreduce float32 32 MB", column))
        for dtype in ("bfloat16", "float16"):
            half = found.get((f"allreduce {dtype} 16 MB", column))
            if whole and half:
                share = statistics.median(half) / statistics.median(whole)
                verdict = "" if is_peer(column) else f", bar 0.65: {'yes' if share <= 0.65 else 'NO'}"
                lines.append(f"{dtype} 16 MB takes {share:.2f} of as many float32 ({column}{verdict})")
    return lines


def tables(records: "list[dict]") -> str:
    """All of it, as text."""
    machines = [record["machine"] for record in records if "machine" in record]
    text = [", ".join(f"{key} {value}" for key, value in machines[-1].items())] if machines else []
    groups, dropped = by_state(records)
    heading = f"{'':44} {'':24} {'median':>10} {'lowest':>10} {'highest':>10} {'':11} {'of':>3}  best peer / ours"
    for (part, ranks, state), launches in groups.items():
        found = cells(launches)
        units = {(r["work"], r["column"]): r["unit"] for record in launches for r in record["results"]}
        text += ["", f"{part}, {ranks} ranks; {state}", heading]
        for work in dict.fromkeys(work for work, _ in found):
            text += [line(found, *key, units[key], ranks, state) for key in found if key[0] == work]
        text += halves(found)
    text += ["", f"{dropped} launches dropped: the machine's state changed under them, or they were disturbed"]
    failed = [f"{r['part']}, {r['ranks']} ranks, {r['program']}" for r in records if r.get("failed")]
    return "\n".join(text + [f"failed: {one}" for one in failed])
