"""Stragglers: how long the others waited for each rank.  Of thousands of ranks, neighbours share a bar."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from megabatch.report import numbers as figures
from megabatch.report import svg
from megabatch.report.html import Markup
from megabatch.report.svg import Frame, figure, grid, scale_of, table, up_to_time
from megabatch.report.view import RankDelay, RankDelays, RunView

MOST_BARS = 128
TOP = 16
HISTOGRAM_BINS = 24
BARS_PX = 160
FEW = 32  # ranks that need no histogram


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
    """The host of every rank, where the plan knows these ranks."""
    topology = view.tuning.topology if view.tuning else None
    if topology is None or topology.num_ranks != view.ranks.num_ranks:
        return {}
    return {rank: number for rank, (number, _) in topology.in_node.items()}


def bars_of(delays: Sequence[float], most: int = MOST_BARS) -> list[tuple[int, int, int]]:
    """Neighbours [begin, end) that share a bar, and which of them delayed most."""
    each = -(-len(delays) // most)
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
        who = f"rank {worst}" if end - begin == 1 else f"ranks {begin:,} to {end - 1:,}, most rank {worst:,}"
        host = f", host {nodes[worst]}" if nodes else ""
        tip = f"{who}{host}: others waited {figures.seconds(delays.delay_s[worst])} longer"
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
        "Who was waited for",
        f"Seconds that others waited for each of {delays.num_ranks:,} ranks; most for rank {first.rank}, "
        f"{figures.seconds(first.delay_s)}.",
        frame.height_px + svg.FOOT_PX,
        svg.y_axis(frame),
        *boxes,
        *labels,
    )
    together = "" if len(bars) == delays.num_ranks else " Neighbours share a bar, which shows the slowest of them."
    return figure(
        "ranks-figure",
        "Who was waited for",
        f"How much longer than this rank the one that waited most has waited, over {delays.num_steps:,} steps, by rank."
        + together,
        drawing,
        numbers=top_table(delays, ordered, nodes),
    )


def top_table(delays: RankDelays, ordered: Sequence[RankDelay], nodes: dict[int, int]) -> Markup:
    rows = [
        (
            f"{row.rank:,}",
            *((f"{nodes[row.rank]:,}",) if nodes else ()),
            figures.seconds(row.delay_s),
            figures.milliseconds(row.delay_s / delays.num_steps) if delays.num_steps else figures.NOTHING,
            figures.seconds(row.wait_s),
            f"{row.num_last:,} of {delays.num_stretches:,}",
        )
        for row in ordered[:TOP]
    ]
    head = ("rank", *(("host",) if nodes else ()), "was waited for", "a step", "waited itself", "last in stretches")
    return table(head, rows, left=())


def histogram(delays: Sequence[float]) -> Markup:
    """How many ranks were waited for how long."""
    x = up_to_time(max(delays), most_ticks=6)
    edges = [x.high * place / HISTOGRAM_BINS for place in range(HISTOGRAM_BINS + 1)]
    counts = [0] * HISTOGRAM_BINS
    for delay_s in delays:
        counts[min(HISTOGRAM_BINS - 1, max(0, bisect_right(edges, delay_s) - 1))] += 1
    frame = Frame(x, scale_of([0.0, *counts], zero=True, most_ticks=4, label=figures.count), BARS_PX)
    spans = [f"{figures.seconds(low)} to {figures.seconds(high)}" for low, high in pairwise(edges)]
    drawing = svg.histogram(
        "ranks-histogram-plot",
        "How many ranks were waited for how long",
        f"A histogram over {len(delays):,} ranks.",
        frame,
        counts,
        [f"{figures.plural(number, 'rank')} waited for {span}" for span, number in zip(spans, counts, strict=True)],
    )
    rows = [(span, f"{number:,}") for span, number in zip(spans, counts, strict=True)]
    return figure(
        "ranks-histogram",
        "How many ranks, how long",
        "A single straggler is a lone bar to the right; a broad hill is the noise of all.",
        drawing,
        numbers=table(("was waited for", "ranks"), rows),
    )
