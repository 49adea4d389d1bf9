"""Charts of stragglers: how long the other ranks waited for each rank.  Neighbouring ranks of thousands share a bar."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from megabatch.io import numbers as fmt
from megabatch.report import svg
from megabatch.report.html import Markup
from megabatch.report.svg import Frame, chart, grid, scale_of, table, up_to_time
from megabatch.report.view import RankDelay, RankDelays, RunView
from megabatch.runs.records import GpuUse

MOST_BARS = 128
TOP = 16
HISTOGRAM_BINS = 24
BARS_PX = 160
FEW = 32  # up to this many ranks need no histogram


def rank_charts(view: RunView) -> Markup | None:
    delays = view.ranks
    if delays.num_ranks < 2:
        return None
    ordered = delays.by_delay()
    return grid(
        delay_chart(delays, ordered, nodes_of(view)),
        histogram([row.delay_s for row in ordered]) if delays.num_ranks > FEW else None,
    )


def nodes_of(view: RunView) -> dict[int, int]:
    """Return the node of every rank, or {} if the plan is for other ranks."""
    topology = view.tuning.topology if view.tuning else None
    if topology is None or topology.num_ranks != view.ranks.num_ranks:
        return {}
    return {rank: number for rank, (number, _) in topology.in_node.items()}


def bars_of(delays: Sequence[float]) -> list[tuple[int, int, int]]:
    """Return the ranks [begin, end) of each bar, and the one of them that delayed the others most."""
    each = -(-len(delays) // MOST_BARS)
    spans = [(begin, min(begin + each, len(delays))) for begin in range(0, len(delays), each)]
    return [(begin, end, max(range(begin, end), key=delays.__getitem__)) for begin, end in spans]


def delay_chart(delays: RankDelays, ordered: Sequence[RankDelay], nodes: dict[int, int]) -> Markup:
    bars = bars_of(delays.delay_s)
    y = up_to_time(max(delays.delay_s))
    frame = Frame(y, y, BARS_PX)
    width = 1 / len(bars)
    boxes = []
    for place, (begin, end, worst) in enumerate(bars):
        top = svg.at_y(frame, delays.delay_s[worst])
        who = f"rank {worst}" if end - begin == 1 else f"ranks {begin:,} to {end - 1:,}, slowest rank {worst:,}"
        node = f", node {nodes[worst]}" if nodes else ""
        tip = f"{who}{node}: others waited {fmt.duration(delays.delay_s[worst])} longer"
        style = "rank top" if worst == ordered[0].rank else "rank"
        gap = 0.15 * width
        boxes.append(svg.box(place * width + gap / 2, top, width - gap, frame.height_px - top, style, tip))
    every = max(1, -(-len(bars) // 8))
    labels = [
        svg.label((place + 0.5) * width, frame.height_px + 18, f"{begin:,}")
        for place, (begin, _, _) in enumerate(bars)
        if place % every == 0
    ]
    first = ordered[0]
    drawing = svg.plot(
        "ranks-plot",
        "Delay by rank",
        f"How long other ranks waited for each of {delays.num_ranks:,} ranks; longest for rank {first.rank}, "
        f"{fmt.duration(first.delay_s)}.",
        frame.height_px + svg.FOOT_PX,
        svg.y_axis(frame),
        *boxes,
        *labels,
    )
    together = "" if len(bars) == delays.num_ranks else " Neighbouring ranks share a bar, which shows the slowest."
    return chart(
        "ranks-figure",
        "Delay by rank",
        "The wait of the rank that waited longest minus this rank's own wait: the slowest rank waits least. "
        f"Summed over {delays.num_steps:,} steps.{together}",
        drawing,
        numbers=top_table(delays, ordered, nodes),
    )


def top_table(delays: RankDelays, ordered: Sequence[RankDelay], nodes: dict[int, int]) -> Markup:
    rows = [
        (
            f"{row.rank:,}",
            *((f"{nodes[row.rank]:,}",) if nodes else ()),
            fmt.duration(row.delay_s),
            fmt.milliseconds(row.delay_s / delays.num_steps) if delays.num_steps else fmt.MISSING,
            fmt.duration(row.wait_s),
            f"{row.num_last:,} of {delays.num_intervals:,}",
        )
        for row in ordered[:TOP]
    ]
    head = ("rank", *(("node",) if nodes else ()), "delayed others", "per step", "waited", "slowest in intervals")
    if not delays.gpus:
        return table(head, rows, left=())
    of_gpus = [gpu_cells(delays.gpus[row.rank] if row.rank < len(delays.gpus) else None) for row in ordered[:TOP]]
    with_gpus = [(*cells, *gpu) for cells, gpu in zip(rows, of_gpus, strict=True)]
    return table((*head, "GPU busy", "power", "clock", "throttled", "errors"), with_gpus, left=())


def gpu_cells(gpu: GpuUse | None) -> tuple[str, ...]:
    """Return the use of a rank's GPU before the newest evaluation."""
    if gpu is None:
        return (fmt.MISSING,) * 5
    slowed = ", ".join(f"{reason} {fmt.percent(share)}" for reason, share in gpu.slowed.items())
    errors = gpu.xid_errors + (gpu.ecc_errors or 0)
    return (
        fmt.MISSING if gpu.utilization is None else fmt.percent(gpu.utilization),
        fmt.MISSING if gpu.power_w is None else f"{gpu.power_w:,.0f} W",
        fmt.MISSING if gpu.clock_mhz is None else f"{gpu.clock_mhz:,.0f} MHz",
        slowed or "no",
        f"{errors:,}",
    )


def histogram(delays: Sequence[float]) -> Markup:
    x = up_to_time(max(delays), most_ticks=6)
    edges = [x.high * place / HISTOGRAM_BINS for place in range(HISTOGRAM_BINS + 1)]
    counts = [0] * HISTOGRAM_BINS
    for delay_s in delays:
        counts[min(HISTOGRAM_BINS - 1, max(0, bisect_right(edges, delay_s) - 1))] += 1
    frame = Frame(x, scale_of([0.0, *counts], zero=True, most_ticks=4, label=fmt.count), BARS_PX)
    return svg.histogram_chart(
        "ranks-histogram",
        "Distribution over ranks",
        f"Delays of {len(delays):,} ranks. A straggler is a separate bar on the right; a broad hill is noise.",
        frame,
        counts,
        [f"{fmt.duration(low)} to {fmt.duration(high)}" for low, high in pairwise(edges)],
        ("delay", "ranks"),
    )
