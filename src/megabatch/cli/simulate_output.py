"""Files of megabatch simulate: rows as JSON, and images/s over ranks as SVG."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megabatch.cli.overrides import require_folder_of
from megabatch.errors import UserError
from megabatch.experiments.drawing import GREY, color_of, dash_of, mark_log_ticks, require_matplotlib, to_svg
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Simulated
from megabatch.simulate.whatif import Search, Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (9.0, 4.0)
MOST_TICKS = 6


def require_output(json: Path | None, plot: Path | None) -> None:
    """Check the output files before the simulation starts."""
    require_folder_of(json)
    if plot:
        if plot.suffix != ".svg":
            raise UserError(f"--plot {plot}: charts are SVG files; use --plot {plot.with_suffix('.svg')}")
        require_folder_of(plot, "--plot")
        require_matplotlib()


def write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}); give another file") from None


def encode(
    job: Job,
    cluster: Cluster,
    ranks: Sequence[int],
    results: Sequence[Simulated],
    variants: Sequence[Variant],
    search: Search | None,
) -> str:
    """Return JSON with rows in the order of --ranks; each number of ranks has a row per variant."""
    rows = [result.row for result in results]
    for num_ranks in ranks:
        for variant in variants:
            rows += [variant.varied | result.row for result in variant.results_at(num_ranks)]
    everything = [*results, *(result for variant in variants for result in variant.results)]
    content: dict[str, Any] = {
        "command": shlex.join(["megabatch", *sys.argv[1:]]),
        "cluster": cluster.name,
        "model": job.workload.model,
        "precision": job.precision,
        "overlap": job.all_reduce.overlap,
        "comm_dtype": everything[0].scenario.in_use.dtype,
        "algorithm": job.all_reduce.algorithm,
        "rows": rows,
    }
    if search:
        content["within"] = {
            "smallest": search.found.row if search.found else None,
            "fastest": search.fastest.row,
        }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def draw(job: Job, cluster: Cluster, results: Sequence[Simulated], variants: Sequence[Variant]) -> str:
    series = variants or [Variant("predicted", {}, list(results))]
    return to_svg(partial(draw_scaling, series=series, title=f"{job.name} on {cluster.name}"))


def draw_scaling(figure: "Figure", series: Sequence[Variant], title: str) -> None:
    """Draw images/s on the left and efficiency, which separates variants better, on the right."""
    figure.set_size_inches(*SIZE_INCHES)
    throughput, efficiency = figure.subplots(1, 2, width_ratios=(4, 3))
    draw_ideal(throughput, series)
    for index, variant in enumerate(series):
        points = sorted(variant.results, key=lambda result: result.scenario.num_ranks)
        ranks = [point.scenario.num_ranks for point in points]
        look: dict[str, Any] = {"marker": ".", "ms": 7, "lw": 1.5, "color": color_of(index + 1), "ls": dash_of(index)}
        throughput.plot(ranks, [point.images_per_s for point in points], label=variant.label, **look)
        efficiency.plot(ranks, [100 * point.efficiency for point in points], **look)
        if len(series) == 1:
            low, high = zip(*((point.low_images_per_s, point.high_images_per_s) for point in points), strict=True)
            throughput.fill_between(ranks, low, high, color=color_of(index + 1), alpha=0.2, lw=0, label="interval")
    results = [result for variant in series for result in variant.results]
    for axes in (throughput, efficiency):
        mark_ranks(axes, sorted({result.scenario.num_ranks for result in results}))
    rates = [result.images_per_s for result in results]
    throughput.set_yscale("log")
    mark_log_ticks(throughput.yaxis, min(rates), max(rates))
    throughput.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    throughput.set_ylabel("images/s")
    throughput.legend(loc="upper left", frameon=False)
    efficiency.set_ylabel("efficiency, %")
    efficiency.set_ylim(0, 103)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)


def draw_ideal(axes: "Axes", series: Sequence[Variant]) -> None:
    """Draw the throughput without waits of the variant that computes fastest."""
    ideal: dict[int, float] = {}
    for variant in series:
        for result in variant.results:
            num_ranks = result.scenario.num_ranks
            ideal[num_ranks] = max(ideal.get(num_ranks, 0.0), result.images_per_s / result.efficiency)
    points = sorted(ideal.items())
    axes.plot([x for x, _ in points], [y for _, y in points], ls=(0, (2, 2)), lw=1, color=GREY, label="no rank waits")


def mark_ranks(axes: "Axes", ranks: Sequence[int]) -> None:
    """Label at most MOST_TICKS rank counts."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    every = -(-len(ranks) // MOST_TICKS)
    marked = ranks[::-1][::every]
    axes.set_xticks(marked, [f"{count:,}" for count in marked])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
