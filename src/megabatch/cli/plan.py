"""megabatch plan: how a run all-reduces its gradients and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import Arguments, Ranks, choose_ranks, load_recipe, require_folder_of, split_arguments
from megabatch.io.numbers import MISSING, in_mb, in_ms, milliseconds, plural
from megabatch.ranks.lifecycle import run_as_rank, start_ranks
from megabatch.text import one_line

if TYPE_CHECKING:
    from megabatch.planning.tuning import Bucket, PricedPlan, Tuning
    from megabatch.ranks.store import RankStore

LONGEST_NAMES = 200  # characters of a bucket's gradients: a plan file may hold any text


def plan(
    given: Arguments = None,
    ranks: Ranks = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the plan to this file.")] = None,
) -> None:
    """Measure the links and show how gradients would be fused and all-reduced, for each bucket, with the reason.

    It does not train. It does not need the images of a named data set. It counts the images of a folder.
    Given the folder of a run, it shows that run's plan.
    [bold]megabatch simulate --cluster this[/bold] uses the measured links.
    Under torchrun, srun or mpiexec, it joins the ranks that they started.
    """
    from megabatch.preflight.profile import plan_all_reduce
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE
    from megabatch.runs.reader import read_plan

    recipe, _ = split_arguments(given)
    require_folder_of(json)
    if Path(recipe).is_dir():
        report(read_plan(Path(recipe)), json)
        return
    info = discover()
    if not info:
        config = load_recipe(given)
        arguments = ["plan", RECIPE, *(["--json", str(json)] if json else [])]
        start_ranks(arguments, choose_ranks(config, ranks), recipe=config.to_toml())
        return

    def work(store: "RankStore") -> int:
        tuning = plan_all_reduce(load_recipe(given, info), store.info, store)
        if info.rank == 0:
            report(tuning, json)
            keep_for_simulate(tuning)
        return 0

    run_as_rank(info, work)


def report(tuning: "Tuning", json: Path | None) -> None:
    import msgspec

    print_plan(tuning)
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(tuning), indent=2) + b"\n")


def keep_for_simulate(tuning: "Tuning") -> None:
    """Store the plan as the cluster `this` of `megabatch simulate`."""
    from contextlib import suppress

    import msgspec

    from megabatch.io.disk import cache_folder, write_file
    from megabatch.simulate.load import THIS

    folder = cache_folder()
    with suppress(OSError):  # without a cache folder, a user can pass the file of --json instead
        if folder:
            write_file(folder / THIS, msgspec.json.encode(tuning), is_private=True)


def print_plan(tuning: "Tuning") -> None:
    from megabatch.io.terminal import Terminal, plain_table

    console = Terminal()
    sizes = [len(node) for node in tuning.topology.nodes]
    each = str(sizes[0]) if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    console.title("ranks")
    console.print(f"{plural(len(sizes), 'host')} of {each}")
    if tuning.links:
        console.title("links")
        table = plain_table()
        table.add_column("axis")
        for column in ("latency us", "carries GB/s", "adds GB/s"):
            table.add_column(column, justify="right")
        for axis, link in tuning.links.items():
            table.add_row(axis, f"{1e6 * link.alpha_s:,.0f}", rate(link.beta_s_per_byte), rate(link.gamma_s_per_byte))
        console.print(table)
    console.title("buckets", "in ms; each plan: predicted, measured")
    table = plain_table()
    table.add_column("", justify="right")
    table.add_column("tensors")
    for column in ("MB", "ready", *(candidate.plan.name for candidate in tuning.buckets[0].candidates), "reduced"):
        table.add_column(column, justify="right")
    table.add_column("choice")
    for index, (bucket, passage) in enumerate(zip(tuning.buckets, tuning.passages, strict=True)):
        table.add_row(
            str(index),
            one_line(describe_tensors(bucket), LONGEST_NAMES),
            in_mb(bucket.num_bytes),
            in_ms(bucket.ready_s),
            *map(describe_plan, bucket.candidates),
            in_ms(passage.end_s),
            bucket.plan.name,
        )
    console.print(table)
    console.title("why")
    for reason, indices in reasons(tuning).items():
        console.print(f"bucket{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}: {reason}")
    console.title("a step")
    num_bytes = sum(bucket.num_bytes for bucket in tuning.buckets)
    num_tensors = sum(len(bucket.gradients) for bucket in tuning.buckets)
    buckets = plural(len(tuning.buckets), "bucket")
    console.print(f"gradients   {num_tensors} tensors, {in_mb(num_bytes)} MB, in {buckets}")
    if len(sizes) > 1:
        console.print(f"inter-node  {in_mb(max(tuning.bytes_crossing))} MB from the node that sends the most")
    console.print(f"backward    {milliseconds(tuning.backward_s)}")
    console.print(f"reduced     after {milliseconds(tuning.predicted_s)}, predicted from the measured links")
    console.print(f"exposed     {milliseconds(tuning.exposed_s)}: the time a step waits for all-reduces after backward")


def reasons(tuning: "Tuning") -> "dict[str, list[int]]":
    """Return the buckets of each reason."""
    found: dict[str, list[int]] = {}
    for index, bucket in enumerate(tuning.buckets):
        found.setdefault(one_line(f"{bucket.plan}; {bucket.reason}"), []).append(index)
    return found


def describe_tensors(bucket: "Bucket") -> str:
    first, last = bucket.gradients[0], bucket.gradients[-1]
    return first if len(bucket.gradients) == 1 else f"{len(bucket.gradients)}: {first} .. {last}"


def describe_plan(candidate: "PricedPlan") -> str:
    measured = MISSING if candidate.measured_s is None else in_ms(candidate.measured_s)
    return f"{in_ms(candidate.predicted_s)} {measured}"


def rate(seconds_per_byte: float) -> str:
    """Return GB/s, or "-" if no time was left to attribute to bytes, which then are not the bottleneck."""
    return f"{1e-9 / seconds_per_byte:,.2f}" if seconds_per_byte > 1e-13 else "-"
