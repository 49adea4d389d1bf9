"""What `megabatch simulate` prints of variants: every algorithm, every value of a sweep, every line of the ladder."""

from collections.abc import Sequence

from rich.table import Table

from megabatch.cli.simulate_numbers import algorithms, figures, interval, milliseconds, percent
from megabatch.cli.simulate_screen import begin, in_lines, new_table, print_assumed
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.whatif import Variant
from megabatch.terminal import Terminal


def print_variants(
    job: Job, cluster: Cluster, variants: Sequence[Variant], ranks: Sequence[int], remarks: Sequence[str]
) -> None:
    """Of each rank count, every variant; of algorithms, the best is marked."""
    console = begin(job, cluster, remarks)
    heading = next(iter(variants[0].varied))
    marks_best = heading == "algorithm"
    # What a training takes says more than an interval and a number of buckets, for which there is then no room.
    middle = ["minutes", "USD"] if job.has_length else ["interval", "buck-ets"]
    table = variants_table(console, heading, ["step ms", "images/s", "effi-ciency", "exposed ms", *middle])
    table.add_column("plan, * best" if marks_best else "plan", vertical="bottom")
    for num_ranks in ranks:
        found = [(variant, result) for variant in variants for result in variant.results_at(num_ranks)]
        best = max((result for _, result in found), key=lambda result: result.images_per_s)
        for variant, result in found:
            training = result.training
            table.add_row(
                f"{num_ranks:,}" if result is found[0][1] else "",
                shown(variant.varied[heading]),
                milliseconds(result.step.total_s),
                figures(result.images_per_s),
                percent(result.efficiency),
                milliseconds(result.step.exposed_s),
                figures(result.minutes) if training else interval(result),
                figures(training.usd) if training else str(len(result.step.buckets)),
                algorithms(result) + " *" * (result is best and marks_best),
            )
    console.print(table)
    print_assumed(console, cluster)


def print_ladder(
    job: Job, cluster: Cluster, variants: Sequence[Variant], ranks: Sequence[int], remarks: Sequence[str]
) -> None:
    """Each line beside the one before, and beside the first."""
    console = begin(job, cluster, remarks)
    table = variants_table(
        console, "improvement", ("step ms", "images/s", "effi-ciency", "x before", "x first", "buck-ets")
    )
    table.add_column("plan", vertical="bottom")
    for num_ranks in ranks:
        found = [(variant, result) for variant in variants for result in variant.results_at(num_ranks)]
        first = before = found[0][1]
        for variant, result in found:
            table.add_row(
                f"{num_ranks:,}" if result is first else "",
                variant.label,
                milliseconds(result.step.total_s),
                figures(result.images_per_s),
                percent(result.efficiency),
                f"{result.images_per_s / before.images_per_s:.2f}",
                f"{result.images_per_s / first.images_per_s:.2f}",
                str(len(result.step.buckets)),
                algorithms(result),
            )
            before = result
    console.print(table)
    print_assumed(console, cluster)


def variants_table(console: Terminal, heading: str, columns: Sequence[str]) -> Table:
    table = new_table(console)
    table.add_column("ranks", justify="right", vertical="bottom")
    table.add_column(heading.replace(".", ".\n"), vertical="bottom", no_wrap=True)
    for column in columns:
        table.add_column(in_lines(column), justify="right", vertical="bottom", no_wrap=True)
    return table


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
