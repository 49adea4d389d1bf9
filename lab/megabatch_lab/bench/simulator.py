"""megabatch bench simulator: compare the predictions of `megabatch simulate` with measurements.

here        hosts of this machine, in shapes that nothing was fitted to (simulated_hosts.py); needs root and iproute2
published   every published ResNet-50 run that can be simulated, up to 4,320 GPUs (published.py)
paper       the results of Jia et al. 2018 on 1,024 and 2,048 P40 (paper.py)
guide       predictions for clusters of 8 to 16,384 GPUs, and the paper's improvements one by one (guide.py)

All except `here` are arithmetic and give the same values on every machine.  `--docs` writes the tables to a page.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.errors import UserError
from megabatch.experiments.drawing import GREY, color_of, mark_log_ticks, to_svg
from megabatch_lab.bench import simulated_hosts
from megabatch_lab.bench.batches import batch_tables
from megabatch_lab.bench.guide import guide_tables
from megabatch_lab.bench.paper import claims
from megabatch_lab.bench.published import (
    SMALL,
    HeldOut,
    Pair,
    Prediction,
    Published,
    Scores,
    predict_all,
    predict_without_cluster,
    predict_without_small,
    read_rows,
    score,
)
from megabatch_lab.bench.report import print_lines, write
from megabatch_lab.bench.simulated_hosts import here_tables, run_here
from megabatch_lab.chaos.namespaces import require_tools

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("here", "published", "paper", "guide", "batch")
ERROR, RATIO_OF_RANKS, RATIO_OF_CARDS, WIDE_ERROR = 0.08, 0.03, 0.06, 0.20  # the targets in docs/scaling.md
BAND = 0.10  # shaded in the plot
SHADE: dict[str, Any] = {"color": "#000000", "alpha": 0.08, "lw": 0}
ONLY_IN_DOCS = {"simulated as", "interval"}  # columns that do not fit in a terminal

Line = dict[str, str]


def run(
    parts: Sequence[str], rounds: int, json_file: Path | None, plot_file: Path | None, docs_file: Path | None
) -> None:
    if "here" in parts:
        require_tools()
    rows: list[dict[str, Any]] = []
    if "published" in parts:
        published = read_rows()
        calibrated, scores = predict_all("calibrates", published), score(predict_all("predicted", published))
        show(published_tables(published, calibrated, scores), docs_file)
        rows += [as_json(prediction) for prediction in (*calibrated, *scores.predictions)]
        if plot_file:
            plot_file.write_text(to_svg(lambda figure: draw(figure, calibrated, scores.predictions)))
    if "paper" in parts:
        show(paper_tables(), docs_file)
    if "guide" in parts:
        show(guide_tables(), docs_file)
    if "batch" in parts:
        show(batch_tables(read_rows()), docs_file)
    if "here" in parts:
        measured = run_here(rounds, json_file)
        show(here_tables(measured), docs_file)
        rows += [simulated_hosts.as_json(row) for row in measured]
    write(rows, json_file)


def show(tables: dict[str, list[Line]], docs_file: Path | None) -> None:
    for title, lines in tables.items():
        print(f"\n{title}")
        print_lines([{name: text for name, text in line.items() if name not in ONLY_IN_DOCS} for line in lines])
    if docs_file:
        write_tables(docs_file, tables)


def default_parts() -> list[str]:
    """Return the parts that this user can run: hosts of this machine need root."""
    try:
        require_tools()
    except UserError as error:
        print(f"megabatch: --part here is left out: {error}", file=sys.stderr)
        return [part for part in PARTS if part != "here"]
    return list(PARTS)


def published_tables(rows: list[Published], calibrated: list[Prediction], scores: Scores) -> dict[str, list[Line]]:
    small = predict_without_small(rows)
    single = [prediction for prediction in calibrated if int(prediction.row.nodes) == 1]
    several = [prediction for prediction in calibrated if int(prediction.row.nodes) > 1]
    left_out = Counter(
        row.reason.split(", submitted again")[0].split("the result of")[0] or "submitted again"
        for row in rows
        if row.role == "left out"
    )
    return {
        "scores of predicted rows": score_lines(scores),
        "predicted": [prediction_line(prediction) for prediction in scores.predictions],
        "calibrated, several nodes": [prediction_line(prediction) for prediction in several],
        "calibrated, one node": node_lines(single),
        "held out, by cluster": held_out_lines(predict_without_cluster(rows)),
        f"held out, below {SMALL} images": [prediction_line(prediction) for prediction in small],
        f"held out, below {SMALL} images, together": [scores_of(small)],
        "left out": [{"rows": str(count), "reason": reason} for reason, count in left_out.most_common()],
    }


def score_lines(scores: Scores) -> list[Line]:
    def ratios(name: str, pairs: Sequence[Pair], bar: float) -> Line:
        errors = sorted(pair.error for pair in pairs)
        within = f"{sum(error <= bar for error in errors)} of {len(errors)} within the bar"
        return {
            "measure": f"{name}: error of the ratio of two rows",
            "found": f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; {within}",
            "bar": f"{bar:.0%}",
        }

    errors = sorted(prediction.error for prediction in scores.predictions)
    of_mlperf = [prediction.error for prediction in scores.predictions if prediction.row.is_mlperf]
    different = sum(pair.differs for pair in scores.overlaps)
    return [
        {
            "measure": "median error",
            "found": f"{scores.median_error:.1%} of {len(errors)} rows; "
            f"{statistics.median(of_mlperf):.1%} of the {len(of_mlperf)} of MLPerf",
            "bar": f"{ERROR:.0%}",
        },
        {
            "measure": f"rows within {WIDE_ERROR:.0%}",
            "found": f"{scores.share_within(WIDE_ERROR):.0%}; worst {errors[-1]:.1%}",
            "bar": "90%",
        },
        ratios("rows that differ only in ranks", scores.ranks, RATIO_OF_RANKS),
        ratios("rows that differ only in the network card", scores.cards, RATIO_OF_CARDS),
        {
            "measure": "order of overlap none, layer, fused",
            "found": f"right in {scores.share_in_order:.0%} of {different} pairs that differ by over 3 %",
            "bar": "100%",
        },
        {
            "measure": "measured rows inside the interval, whose width was chosen after seeing them",
            "found": f"{scores.share_in_interval:.0%}",
            "bar": "80% to 97%",
        },
    ]


def prediction_line(prediction: Prediction) -> Line:
    row, simulated = prediction.row, prediction.simulated
    return {
        "run": describe_row(row),
        "simulated as": " ".join(filter(None, [row.cluster, row.overrides, f"overlap {row.overlap}"])),
        "GPUs": f"{int(row.ranks):,}",
        "batch": f"{float(row.batch_per_rank):g}",
        "measured": f"{prediction.measured:,.0f}",
        "predicted": f"{simulated.images_per_s:,.0f}",
        "interval": f"{simulated.low_images_per_s:,.0f} to {simulated.high_images_per_s:,.0f}",
        "error": f"{prediction.ratio - 1:+.1%}",
        "in it": "yes" if prediction.is_in_interval else "no",
    }


def node_lines(predictions: Sequence[Prediction]) -> list[Line]:
    """Group single nodes by device, because the curve of a device was fitted to them."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(prediction.row.reason, []).append(prediction)
    return [
        {
            "fitted to": reason,
            "rows": str(len(group)),
            "GPUs in a node": spread([int(prediction.row.ranks) for prediction in group]),
            "batch": spread([int(prediction.row.batch_per_rank) for prediction in group]),
            "median error": f"{statistics.median(p.error for p in group):.1%}",
            "worst": f"{max(p.error for p in group):.1%}",
        }
        for reason, group in groups.items()
    ]


def held_out_lines(clusters: Sequence[HeldOut]) -> list[Line]:
    """Return a line per cluster that was left out, and their total."""
    together = HeldOut(
        "all",
        sum(held_out.num_points for held_out in clusters),
        [prediction for held_out in clusters for prediction in held_out.predictions],
        [row for held_out in clusters for row in held_out.left],
    )
    return [
        {
            "left out": held_out.cluster,
            "points removed": str(held_out.num_points),
            "cannot be held out": str(len(held_out.left)),
            **scores_of(held_out.predictions),
        }
        for held_out in (*clusters, together)
    ]


def scores_of(group: Sequence[Prediction]) -> Line:
    columns = ("rows", "GPUs", "batch", "median error", "worst", "in their intervals")
    if not group:
        return dict.fromkeys(columns, "-")
    values = (
        str(len(group)),
        spread([int(prediction.row.ranks) for prediction in group]),
        spread([int(prediction.row.batch_per_rank) for prediction in group]),
        f"{statistics.median(p.error for p in group):.1%}",
        f"{max(p.error for p in group):.1%}",
        str(sum(p.is_in_interval for p in group)),
    )
    return dict(zip(columns, values, strict=True))


def spread(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def describe_row(row: Published) -> str:
    return (
        row.source.replace("/results/", " ")
        if row.source.startswith("mlp-")
        else f"{row.source.split(' ')[0]} {row.system}"
    )


def paper_tables() -> dict[str, list[Line]]:
    return {
        "the paper": [
            {
                "result": claim.what,
                "reported": claim.reported,
                "predicted": claim.predicted,
                "needed for it": claim.needed,
            }
            for claim in claims()
        ]
    }


def write_tables(path: Path, tables: dict[str, list[Line]]) -> None:
    """Replace the tables between the markers of the page: <!-- table: predicted --> ... <!-- end -->."""
    text = path.read_text()
    for title, lines in tables.items():
        text = with_table(text, title, lines)
    path.write_text(text)


def with_table(text: str, title: str, lines: list[Line]) -> str:
    begin, end = f"<!-- table: {title} -->\n", "<!-- end -->"
    assert begin in text, f"the page has no marker {begin}"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}{markdown(lines)}{end}{tail}"


def markdown(lines: list[Line]) -> str:
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def as_json(prediction: Prediction) -> dict[str, Any]:
    row = prediction.row
    return {
        "source": row.source,
        "system": row.system,
        "role": row.role,
        "cluster": row.cluster,
        "overrides": row.overrides,
        "overlap": row.overlap,
        "measured_images_per_s": prediction.measured,
        "error": prediction.ratio - 1,
        **prediction.simulated.row,
    }


def draw(figure: "Figure", calibrated: Sequence[Prediction], predicted: Sequence[Prediction]) -> None:
    """Plot simulated against measured images/s, and below it the error against the number of GPUs."""
    figure.set_size_inches(6.4, 7.4)
    above, below = figure.subplots(2, 1, height_ratios=[2.4, 1])
    groups = {"fitted": (calibrated, GREY, 3.0), "predicted": (predicted, color_of(1), 5.0)}
    low, high = 500.0, 1e7
    above.fill_between(
        [low, high], [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)], **SHADE
    )
    above.plot([low, high], [low, high], color=GREY, lw=0.8)
    below.axhspan(-100 * BAND, 100 * BAND, **SHADE)
    for name, (predictions, color, size) in groups.items():
        dots: dict[str, Any] = {"color": color, "ms": size, "mec": "white", "mew": 0.5}
        measured = [prediction.measured for prediction in predictions]
        simulated = [prediction.simulated.images_per_s for prediction in predictions]
        above.plot(measured, simulated, "o", label=f"{name}, {len(predictions)} rows", **dots)
        errors = [100 * (prediction.ratio - 1) for prediction in predictions]
        below.plot([int(prediction.row.ranks) for prediction in predictions], errors, "o", **dots)
    above.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    above.set(xlabel="measured images/s", ylabel="simulated images/s")
    above.set_title(f"ResNet-50, published runs on up to 4,320 GPUs; the band is {BAND:.0%}")
    below.set(xscale="log", xlabel="GPUs", ylabel="error, %", xlim=(0.8, 8000))
    mark_log_ticks(below.xaxis, 1, 8000)
    for axis in (above.xaxis, above.yaxis):
        mark_log_ticks(axis, low, high)
    above.legend(frameon=False)
