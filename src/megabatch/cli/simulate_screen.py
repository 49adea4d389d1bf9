"""What `megabatch simulate` prints: a table, the plan and why, where a step goes, and what would change it."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from megabatch.io.terminal import BOLD, Terminal, plain_table
from megabatch.planning.tuning import Bucket
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Simulated, Training
from megabatch.simulate.step import Step
from megabatch.simulate.whatif import Search, Variant, changes, exposed_by_algorithm, losses
from megabatch.text import one_line

# Numbers of a simulation as they are printed.


def ranks_of(result: Simulated) -> str:
    return f"{result.scenario.num_ranks:,} rank{'s' * (result.scenario.num_ranks > 1)}"


def nodes(result: Simulated) -> str:
    shape = result.scenario.cluster.shape(result.scenario.num_ranks)
    count = shape.num_nodes
    return f"{ranks_of(result)} ({count:,} node{'s' * (count > 1)} of {shape.largest_node})"


def describe_links(cluster: Cluster) -> str:
    """As 'nodes of 8 at 183 GB/s, 8 cards of 200 Gb/s (rdma), sums in switches'."""
    node, network = cluster.node, cluster.network
    inside = f"nodes of {node.ranks} at {figures(node.gb_per_s)} GB/s" if node.ranks > 1 else "nodes of one rank"
    if cluster.cpu:  # which then decide
        shared = " that they share" if cluster.cpu.hosts_on_machine else ""
        inside = f"nodes of {node.ranks} on {cluster.cpu.cores:g} cores{shared}"
    cards = f"{network.nics} card{'s' * (network.nics > 1)} of {figures(network.gbps)} Gb/s ({network.kind})"
    return f"{inside}, {cards}, {'sums in switches' if network.in_network_reduction else 'no sums in switches'}"


def algorithms(result: Simulated) -> str:
    return "+".join(dict.fromkeys(bucket.plan.name.partition("/")[0] for bucket in result.step.buckets)) or "-"


def interval(result: Simulated) -> str:
    """Of images/s, as -6 +5 %."""
    low, high = (100 * (rate / result.images_per_s - 1) for rate in (result.low_images_per_s, result.high_images_per_s))
    return f"{low:.0f} {high:+.0f} %"


def milliseconds(seconds: float) -> str:
    return figures(1e3 * seconds)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def figures(value: float | None) -> str:
    """About three of them: 0.042, 0.421, 7.31, 48.2, 1,204."""
    if value is None:
        return "-"
    digits = next((digits for digits, bound in enumerate((100, 10, 1, 0.1)) if abs(value) >= bound), 3)
    return f"{value:,.{digits}f}" if value else "0"


def duration(minutes: float) -> str:
    """In the unit that one would say."""
    if minutes < 2:
        return f"{figures(60 * minutes)} s"
    return f"{figures(minutes)} minutes" if minutes < 120 else f"{figures(minutes / 60)} hours"


BAR = 64  # characters
WIDE = 100  # columns, from which a table has room
MOST_BUCKETS = 8  # that are listed one by one
MATTERS = 0.05  # interruptions that are expected


def print_report(
    job: Job, cluster: Cluster, results: Sequence[Simulated], remarks: Sequence[str], search: Search | None, within: str
) -> None:
    console = begin(job, cluster, remarks)
    if search:
        console.print(one_line(answer(search, within)), style=BOLD)
        console.print()
    console.print(main_table(console, results))
    largest = max(results, key=lambda result: result.scenario.num_ranks)
    print_plan(console, largest)
    print_step(console, largest)
    print_changes(console, largest)
    if largest.training:
        print_faults(console, largest.training)
    print_assumed(console, cluster)


def begin(job: Job, cluster: Cluster, remarks: Sequence[str]) -> Terminal:
    """What is simulated, and what to know of it."""
    console = Terminal(soft_wrap=False)
    workload, device, profile = job.workload, cluster.device, job.profile
    model = f"{workload.model} at {workload.image_size} pixels in {job.precision}"
    name = f"{job.name}: " if job.name != workload.model else ""
    computing = f"{device.name}, {device.stack}"
    if profile:
        computing = f"as recorded on {profile.device}, {profile.threads} thread{'s' * (profile.threads > 1)} a rank"
    console.print()
    console.print(one_line(f"{name}{model} on {cluster.name} ({computing})"))
    console.print(one_line(describe_links(cluster)))
    for remark in remarks:
        console.print(f"note: {one_line(remark)}")
    console.print()
    return console


def print_assumed(console: Terminal, cluster: Cluster) -> None:
    """What no source gives."""
    assumed = [key for key, source in cluster.sources.items() if source.startswith("assumed")]
    if assumed:
        console.print()
        console.print(one_line(f"assumed, since no source gives them: {', '.join(assumed)}"))


def new_table(console: Terminal) -> Table:
    gap = 2 if console.width >= WIDE else 1
    return plain_table(padding=(0, gap, 0, 0))


def in_lines(heading: str) -> str:
    """Narrow, as the numbers below it."""
    return heading.replace(" ", "\n").replace("-", "-\n").replace("/fp", "\n/fp").replace("/bf", "\n/bf")


def main_table(console: Terminal, results: Sequence[Simulated]) -> Table:
    table = new_table(console)
    has_end, has_price = (any(map(each, results)) for each in (training_of, usd_of))
    columns = ["ranks", "batch", "step ms", "images/s", "interval", "effi-ciency", "exposed ms"]
    columns += ["minutes", "rank-hours"] * has_end + ["USD"] * has_price
    for column in columns:
        table.add_column(in_lines(column), justify="right", vertical="bottom", no_wrap=True)
    for result in results:
        step, num_ranks = result.step, result.scenario.num_ranks
        row = [
            f"{num_ranks:,}",
            f"{result.scenario.global_batch:,}",
            milliseconds(step.total_s),
            figures(result.images_per_s),
            interval(result),
            percent(result.efficiency),
            milliseconds(step.exposed_s),
        ]
        if has_end:
            row += [figures(result.minutes), figures(result.rank_hours)]
        if has_price:
            row.append(figures(usd_of(result)))
        table.add_row(*row)
    return table


def print_plan(console: Terminal, result: Simulated) -> None:
    buckets = result.step.buckets
    scenario = result.scenario
    console.title(f"all-reduce at {ranks_of(result)}", result.plan)
    if not buckets:
        return
    if scenario.all_reduce.algorithm == "auto":
        others = [f"{name} {milliseconds(exposed_s)}" for name, exposed_s in exposed_by_algorithm(scenario).items()]
        console.print(
            f"{milliseconds(result.step.exposed_s)} ms are exposed; with one algorithm for all buckets: "
            f"{', '.join(others)}"
        )
    if len(buckets) > MOST_BUCKETS:
        for plan in dict.fromkeys(bucket.plan for bucket in buckets):
            sizes = [bucket.num_bytes for bucket in buckets if bucket.plan == plan]
            plural = "s" * (len(sizes) > 1)
            console.print(f"{len(sizes)} bucket{plural}, {sum(sizes) / 1e6:,.1f} MB: {plan}")
        return
    console.print(buckets_table(console, buckets))
    for plan in dict.fromkeys(bucket.plan for bucket in buckets):
        console.print(str(plan))
    for reason, indices in reasons(buckets).items():
        console.print(f"bucket{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}: {one_line(reason)}")


def reasons(buckets: Sequence[Bucket]) -> dict[str, list[int]]:
    """The buckets for which each holds."""
    found: dict[str, list[int]] = {}
    for index, bucket in enumerate(buckets):
        found.setdefault(f"{bucket.plan.name}, {bucket.reason}", []).append(index)
    return found


def buckets_table(console: Terminal, buckets: Sequence[Bucket]) -> Table:
    """With the price of every plan, that of the chosen one bold."""
    table = new_table(console)
    names = [candidate.plan.name for candidate in buckets[0].candidates]
    for column in ("", "tensors", "MB", "ready ms", *(f"{name} ms" for name in names)):
        table.add_column(in_lines(column), justify="right", vertical="bottom", no_wrap=True)
    table.add_column("last tensor", vertical="bottom", overflow="fold")
    for index, bucket in enumerate(buckets):
        prices = [Text(milliseconds(candidate.predicted_s)) for candidate in bucket.candidates]
        prices[bucket.chosen].stylize(BOLD)
        table.add_row(
            str(index),
            str(len(bucket.gradients)),
            f"{bucket.num_bytes / 1e6:,.2f}",
            milliseconds(bucket.ready_s),
            *prices,
            bucket.gradients[-1],
        )
    return table


def print_step(console: Terminal, result: Simulated) -> None:
    step, lost = result.step, losses(result)
    console.title(f"where a step of {milliseconds(step.total_s)} ms goes")
    console.print(bar(step))
    details = {
        "exposed all-reduce": f"of {milliseconds(step.all_reduce_s)} ms that the buckets take",
        "jitter": "waiting for the slowest rank",
        "input": "waiting for images, of which a node reads too few",
    }
    for mark, name, seconds in parts_of(step):
        if seconds:
            line = f"{mark} {name:<18} {milliseconds(seconds):>8} ms {100 * seconds / step.total_s:>5.1f} %"
            console.print(f"{line}  {details.get(name, '')}".rstrip())
    if lost.computing < 1:
        console.print(
            f"efficiency {percent(lost.computing)}: latencies {percent(lost.latency)}, "
            f"bytes on their way {percent(lost.carrying)}, jitter {percent(lost.jitter)}"
            + (f", input {percent(lost.images)}" if lost.images else "")
        )


def parts_of(step: Step) -> list[tuple[str, str, float]]:
    return [
        ("█", "forward", step.forward_s),
        ("▓", "backward", step.backward_s),
        ("▒", "update", step.update_s),
        ("░", "exposed all-reduce", step.exposed_s),
        ("·", "jitter", step.jitter_s),
        ("-", "input", step.input_s),
    ]


def bar(step: Step) -> str:
    """As long as BAR; each part begins where those before it end."""
    marks, past_s = "", 0.0
    for mark, _, seconds in parts_of(step):
        past_s += seconds
        marks += mark * (round(BAR * past_s / step.total_s) - len(marks))
    return marks


def print_changes(console: Terminal, result: Simulated) -> None:
    console.title(f"what one change would buy at {ranks_of(result)}")
    found = changes(result)
    for change in found:
        console.print(
            f"{'+' + figures(change.gained):>11} images/s {100 * change.share:>+6.1f} %  {one_line(change.label)}"
        )
    if not found:
        console.print("none of those that were tried gains half a percent")


def print_faults(console: Terminal, training: Training) -> None:
    if training.num_interruptions > MATTERS and training.checkpoint_minutes is not None:
        console.title(
            "interruptions",
            f"{figures(training.num_interruptions)} expected; a checkpoint every "
            f"{duration(training.checkpoint_minutes)} costs least (Young 1974, Daly 2006); "
            f"checkpoints, repeated steps and restarts then take {duration(training.faults_s / 60)} of "
            f"{duration(training.total_s / 60)}",
        )


def answer(search: Search, within: str) -> str:
    if search.found:
        return (
            f"{nodes(search.found)} finish in {duration(search.found.minutes or 0.0)}: the fewest whole nodes that "
            f"share the batch evenly and are done within {within}"
        )
    lost = losses(search.fastest)
    waits = {
        "latencies of the all-reduce": lost.latency,
        "bytes of the all-reduce on their way": lost.carrying,
        "jitter": lost.jitter,
        "images, of which nodes read too few": lost.images,
    }
    limit = max(waits, key=lambda name: waits[name])
    why = f"{limit} ({percent(waits[limit])} of a step), which more ranks make longer"
    if search.fastest.scenario.num_ranks == search.most_ranks:
        why = f"computing ({percent(lost.computing)} of a step), and no more ranks were tried"
    return (
        f"no cluster of this kind is done within {within}; the fastest that was tried, {nodes(search.fastest)}, takes "
        f"{duration(search.fastest.minutes or 0.0)}, limited by {why}"
    )


def training_of(result: Simulated) -> Training | None:
    return result.training


def usd_of(result: Simulated) -> float | None:
    return result.training.usd if result.training else None


# What `megabatch simulate` prints of variants: every algorithm, every value of a sweep, every line of the ladder.


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
