"""megabatch simulate --batch auto: the best global batch for each number of ranks."""

import csv
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from megabatch.cli.overrides import require_folder_of
from megabatch.cli.simulate_output import SIZE_INCHES, mark_ranks, write
from megabatch.cli.simulate_screen import begin, new_table, print_assumed
from megabatch.config.reference_results import epoch_points, spans_of
from megabatch.errors import UserError
from megabatch.experiments.batch_limit import curve_of_study
from megabatch.experiments.drawing import color_of, mark_log_ticks, to_svg
from megabatch.experiments.page import load_study
from megabatch.io.numbers import duration, in_ms, percent, three_digits
from megabatch.io.terminal import BOLD
from megabatch.planning.epochs import EpochCurve, fit_epochs
from megabatch.runs.epochs import curve_of_run
from megabatch.runs.reader import is_run
from megabatch.simulate.best_batch import Candidate, Goal, Limits, Spans, best_batches, choose, refine
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.whatif import LARGEST_SEARCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MLPERF_EVALUATES_EVERY = 4  # epochs
PUBLISHED = "#3f4b59"


class PublishedRun(Struct):
    cluster: str
    ranks: int
    minutes: float
    source: str

    @property
    def label(self) -> str:
        return "MLPerf" if self.source.startswith("mlp-") else self.source


class Question(NamedTuple):
    goal: Goal
    limits: Limits
    within: str  # as given
    budget: str


def load_curve(source: str | None, job: Job) -> EpochCurve:
    """Return the curve of a run's noise scale or a batch-limit study, by default of MLPerf's reference points."""
    if source is not None:
        path = Path(source)
        if is_run(path):
            return curve_of_run(path)
        if path.suffix == ".json":
            return curve_of_study(load_study(path))
        raise UserError(
            f"--curve {source} is not a run's folder; give a run that reached its target, or the JSON of a batch-limit "
            "study"
        )
    points = epoch_points(job.workload.model, job.num_train)
    if not points:
        raise UserError(
            f"--batch auto: there are no reference convergence points of {job.workload.model} on {job.num_train:,} "
            "images; give a run that reached its target: --curve RUN"
        )
    return fit_epochs(points, "MLPerf's reference convergence points, 75.9 %")


def published_runs() -> list[PublishedRun]:
    """Return runs of ResNet-50: MLPerf's to 75.9 %, the fastest on each preset and number of ranks, and the paper's."""
    with resources.files("megabatch.simulate").joinpath("runs.csv").open() as file:
        return [msgspec.convert(row, PublishedRun, strict=False) for row in csv.DictReader(file)]


def known_spans(job: Job) -> Spans:
    """Return the spans of reference results of this model and data set, else that of the recipe.

    The smallest on ImageNet, 32, is that of Goyal et al. 2017 and of MLPerf's entries on 2,528 to 4,216 GPUs.
    """
    spans = spans_of(job.workload.model, job.num_train)
    if not spans and job.microbatch is None:
        raise UserError(
            f"--batch auto: no span of BatchNorm is known to converge for {job.workload.model} on {job.num_train:,} "
            "images; give a recipe, whose batch.micro is used"
        )
    return Spans(min(spans, default=job.microbatch or 1), max(spans, default=job.microbatch or 1))


def answer(
    job: Job,
    cluster: Cluster,
    counts: Sequence[int],
    question: Question,
    curve_source: str | None,
    remarks: list[str],
    json: Path | None,
    plot: Path | None,
) -> None:
    """Simulate, and write the rows and the chart."""
    require_folder_of(json)
    curve = load_curve(curve_source, job)
    if curve_source is None:
        job = replace(job, evaluate_every=MLPERF_EVALUATES_EVERY)
    if question.limits.usd is not None and not cluster.price.usd_per_rank_hour:
        raise UserError(f"--budget: {cluster.name} has no price; add, for example, price.usd_per_rank_hour=2")
    spans, is_searched = known_spans(job), not counts
    if is_searched:
        size = cluster.node.ranks
        counts = [size << doublings for doublings in range((LARGEST_SEARCH // size).bit_length())]
    found, beyond = best_batches(job, cluster, curve, spans, counts)
    reason = f"all batches are beyond {curve.largest:,}, the largest known one"
    if is_searched:
        found = refine(job, cluster, curve, spans, found, question.limits, question.goal)
    elif beyond:
        remarks = [*remarks, f"left out: {', '.join(f'{count:,}' for count in beyond)} ranks: {reason}"]
    left_out = [{"ranks": count, "reason": reason} for count in beyond]
    chosen = choose(found, question.limits, question.goal)
    if json:
        write(json, "--json", encode(job, cluster, curve, found, left_out, chosen))
    if plot:
        title = f"{job.name} on {cluster.name}: the best batch at each number of ranks"
        runs = [run for run in published_runs() if (run.cluster, job.workload.model) == (cluster.name, "resnet50")]
        write(plot, "--plot", to_svg(partial(draw, found=found, runs=runs, title=title)))
    print_answer(job, cluster, curve, found, chosen, question, remarks)


def print_answer(
    job: Job,
    cluster: Cluster,
    curve: EpochCurve,
    found: Sequence[Candidate],
    chosen: Candidate | None,
    question: Question,
    remarks: Sequence[str],
) -> None:
    console = begin(job, cluster, remarks)
    console.print(
        f"epochs: {curve.fewest:.1f} x (1 + batch / {curve.critical:,.0f}), misfit {percent(curve.misfit, 1)}, "
        f"from {curve.smallest:,} to {curve.largest:,} ({curve.source})"
    )
    asked = " and ".join(filter(None, [question.within, question.budget]))
    within = f" within {asked}" if asked else ""
    if chosen:
        usd = f" and {three_digits(chosen.usd)} USD" if chosen.usd is not None else ""
        console.print(
            f"{'cheapest' if question.goal == 'cost' else 'fastest'}{within}: "
            f"{chosen.simulated.scenario.num_ranks:,} ranks with a batch of {chosen.batch:,}, "
            f"{duration(60 * chosen.minutes)}{usd}",
            style=BOLD,
        )
    else:
        console.print(f"no number of ranks finishes{within}")
    console.print()
    table = new_table(console)
    has_price = any(each.usd is not None for each in found)
    columns = ["ranks", "batch", "micro", "epochs", "step ms", "effi-\nciency", "minutes", "interval"]
    for column in columns + ["USD"] * has_price:
        table.add_column(column, justify="right", vertical="bottom", no_wrap=True)
    for each in found:
        simulated = each.simulated
        row = [
            f"{simulated.scenario.num_ranks:,}",
            f"{each.batch:,}",
            f"{simulated.scenario.microbatch:,.0f}",
            f"{each.epochs:.1f}",
            in_ms(simulated.step.total_s),
            percent(simulated.efficiency, 1),
            three_digits(each.minutes),
            f"{three_digits(each.low_minutes)} to {three_digits(each.high_minutes)}",
        ]
        table.add_row(*row, *([three_digits(each.usd)] if has_price else []))
    console.print(table)
    print_assumed(console, cluster)


def encode(
    job: Job,
    cluster: Cluster,
    curve: EpochCurve,
    found: Sequence[Candidate],
    left_out: Sequence[dict[str, Any]],
    chosen: Candidate | None,
) -> str:
    content = {
        "command": shlex.join(["megabatch", *sys.argv[1:]]),
        "cluster": cluster.name,
        "model": job.workload.model,
        "precision": job.precision,
        "curve": curve,
        "chosen": chosen.row if chosen else None,
        "rows": [each.row for each in found],
        "left_out": left_out,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def draw(figure: "Figure", found: Sequence[Candidate], runs: Sequence[PublishedRun], title: str) -> None:
    """Draw minutes against ranks, with the best batch at each point, and published runs."""
    figure.set_size_inches(*SIZE_INCHES)
    axes = figure.subplots()
    ranks = [each.simulated.scenario.num_ranks for each in found]
    minutes = [each.minutes for each in found]
    low, high = [each.low_minutes for each in found], [each.high_minutes for each in found]
    axes.fill_between(ranks, low, high, color=color_of(1), alpha=0.2, lw=0, label="interval")
    axes.plot(ranks, minutes, marker=".", ms=7, lw=1.5, color=color_of(1), label="predicted, best batch")
    for each, x, y in zip(found, ranks, minutes, strict=True):
        axes.annotate(f"{each.batch:,}", (x, y), (4, 5), textcoords="offset points", fontsize=7)
    for label, group in groupby(runs, key=lambda run: run.label):
        places = [(run.ranks, run.minutes) for run in group]
        axes.plot(*zip(*places, strict=True), "x", color=PUBLISHED, label=label)
    axes.set_yscale("log")
    mark_ranks(axes, sorted(ranks))
    mark_log_ticks(axes.yaxis, min(low), max(high))
    axes.set_ylabel("minutes to the target")
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
