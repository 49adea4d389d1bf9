"""Terminal output of megabatch simulate: results, the plan and its reasons, the parts of a step, possible gains."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from megabatch.io.numbers import duration, in_mb, in_ms, percent, plural, three_digits
from megabatch.io.terminal import BOLD, Terminal, plain_table
from megabatch.planning.tuning import Bucket
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Simulated, SimulatedTraining
from megabatch.simulate.step import SimulatedStep
from megabatch.simulate.whatif import Search, Variant, changes, exposed_by_algorithm, losses
from megabatch.text import one_line


def ranks_of(result: Simulated) -> str:
    return plural(result.scenario.num_ranks, "rank")


def nodes(result: Simulated) -> str:
    shape = result.scenario.cluster.shape(result.scenario.num_ranks)
    return f"{ranks_of(result)} ({plural(shape.num_nodes, 'node')} of {shape.largest_node})"


def describe_links(cluster: Cluster) -> str:
    """Return, for example: nodes of 8 at 183 GB/s, 8 cards of 200 Gb/s (rdma), in-network reduction."""
    node, network = cluster.node, cluster.network
    inside = f"nodes of {node.ranks} at {three_digits(node.gb_per_s)} GB/s" if node.ranks > 1 else "nodes of one rank"
    if cluster.cpu:  # the cores then limit the node
        shared = " that all nodes share" if cluster.cpu.hosts_on_machine else ""
        inside = f"nodes of {node.ranks} on {cluster.cpu.cores:g} cores{shared}"
    cards = f"{plural(network.nics, 'card')} of {three_digits(network.gbps)} Gb/s ({network.kind})"
    return f"{inside}, {cards}, {'in-network reduction' if network.in_network_reduction else 'no in-network reduction'}"


def algorithms(result: Simulated) -> str:
    return "+".join(dict.fromkeys(bucket.plan.name.partition("/")[0] for bucket in result.step.buckets)) or "-"


def interval(result: Simulated) -> str:
    """Return the interval of images/s, such as -6 +5 %."""
    low, high = (100 * (rate / result.images_per_s - 1) for rate in (result.low_images_per_s, result.high_images_per_s))
    return f"{low:.0f} {high:+.0f} %"


BAR = 64  # characters
WIDE = 100  # columns from which a table has wider gaps
MOST_BUCKETS = 8  # that are listed individually
MATTERS = 0.05  # expected interruptions below this are not reported


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
    print_stages(console, largest)
    print_step(console, largest)
    print_changes(console, largest)
    if largest.training:
        print_faults(console, largest.training)
    print_assumed(console, cluster)


def begin(job: Job, cluster: Cluster, remarks: Sequence[str]) -> Terminal:
    """Print the job, the cluster and the notes."""
    console = Terminal(soft_wrap=False)
    workload, device, profile = job.workload, cluster.device, job.profile
    model = f"{workload.model} at {workload.image_size} pixels in {job.precision}"
    name = f"{job.name}: " if job.name != workload.model else ""
    computing = f"{device.name}, {device.stack}"
    if profile:
        computing = f"as recorded on {profile.device}, {plural(profile.threads, 'thread')} per rank"
    console.print()
    console.print(one_line(f"{name}{model} on {cluster.name} ({computing})"))
    console.print(one_line(describe_links(cluster)))
    for remark in remarks:
        console.print(f"note: {one_line(remark)}")
    console.print()
    return console


def print_assumed(console: Terminal, cluster: Cluster) -> None:
    """Print the values of the cluster that have no source."""
    assumed = [key for key, source in cluster.sources.items() if source.startswith("assumed")]
    if assumed:
        console.print()
        console.print(one_line(f"assumed, without a source: {', '.join(assumed)}"))


def new_table(console: Terminal) -> Table:
    gap = 2 if console.width >= WIDE else 1
    return plain_table(padding=(0, gap, 0, 0))


def in_lines(heading: str) -> str:
    """Return a heading broken into short lines, as narrow as its numbers."""
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
            in_ms(step.total_s),
            three_digits(result.images_per_s),
            interval(result),
            percent(result.efficiency, 1),
            in_ms(step.exposed_s),
        ]
        if has_end:
            row += [three_digits(result.minutes), three_digits(result.rank_hours)]
        if has_price:
            row.append(three_digits(usd_of(result)))
        table.add_row(*row)
    return table


def print_plan(console: Terminal, result: Simulated) -> None:
    buckets = result.step.buckets
    scenario = result.scenario
    console.title(f"all-reduce at {ranks_of(result)}", result.plan)
    if not buckets:
        return
    if scenario.all_reduce.algorithm == "auto":
        others = [f"{name} {in_ms(exposed_s)}" for name, exposed_s in exposed_by_algorithm(scenario).items()]
        console.print(
            f"{in_ms(result.step.exposed_s)} ms exposed; with one algorithm for all buckets: {', '.join(others)}"
        )
    if len(buckets) > MOST_BUCKETS:
        for plan in dict.fromkeys(bucket.plan for bucket in buckets):
            sizes = [bucket.num_bytes for bucket in buckets if bucket.plan == plan]
            console.print(f"{plural(len(sizes), 'bucket')}, {in_mb(sum(sizes))} MB: {plan}")
        return
    console.print(buckets_table(console, buckets))
    for plan in dict.fromkeys(bucket.plan for bucket in buckets):
        console.print(str(plan))
    for reason, indices in reasons(buckets).items():
        console.print(f"bucket{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}: {one_line(reason)}")


def reasons(buckets: Sequence[Bucket]) -> dict[str, list[int]]:
    """Return the buckets of each reason."""
    found: dict[str, list[int]] = {}
    for index, bucket in enumerate(buckets):
        found.setdefault(f"{bucket.plan.name}, {bucket.reason}", []).append(index)
    return found


def buckets_table(console: Terminal, buckets: Sequence[Bucket]) -> Table:
    """Return a table with the predicted time of every plan; the chosen one is bold."""
    table = new_table(console)
    names = [candidate.plan.name for candidate in buckets[0].candidates]
    for column in ("", "tensors", "MB", "ready ms", *(f"{name} ms" for name in names)):
        table.add_column(in_lines(column), justify="right", vertical="bottom", no_wrap=True)
    table.add_column("last tensor", vertical="bottom", overflow="fold")
    for index, bucket in enumerate(buckets):
        prices = [Text(in_ms(candidate.predicted_s)) for candidate in bucket.candidates]
        prices[bucket.chosen].stylize(BOLD)
        table.add_row(
            str(index),
            str(len(bucket.gradients)),
            in_mb(bucket.num_bytes),
            in_ms(bucket.ready_s),
            *prices,
            bucket.gradients[-1],
        )
    return table


def print_stages(console: Terminal, result: Simulated) -> None:
    """Print the cost of each training image size; the other tables are for the largest."""
    if not result.stages:
        return
    console.title(f"image sizes at {ranks_of(result)}", "the other tables are for the largest")
    table = new_table(console)
    for column in ("side", "steps", "step ms", "images/s", "GB per rank"):
        table.add_column(in_lines(column), justify="right", vertical="bottom", no_wrap=True)
    for each in result.stages:
        table.add_row(
            f"{each.stage.side}",
            f"{each.stage.num_steps:,}",
            in_ms(each.step.total_s),
            three_digits(result.scenario.global_batch / each.step.total_s),
            three_digits(each.memory_bytes / 1e9),
        )
    console.print(table)
    assert result.scenario.length
    if result.scenario.length.test_side:
        console.print(f"tested at {result.scenario.length.test_side} pixels")


def print_step(console: Terminal, result: Simulated) -> None:
    step, lost = result.step, losses(result)
    console.title(f"parts of a step of {in_ms(step.total_s)} ms")
    console.print(bar(step))
    details = {
        "exposed all-reduce": f"of {in_ms(step.all_reduce_s)} ms in total",
        "jitter": "waiting for the slowest rank",
        "input": "waiting for images: nodes read too slowly",
    }
    for mark, name, part_s in parts_of(step):
        if part_s:
            line = f"{mark} {name:<18} {in_ms(part_s):>8} ms {100 * part_s / step.total_s:>5.1f} %"
            console.print(f"{line}  {details.get(name, '')}".rstrip())
    if lost.computing < 1:
        console.print(
            f"efficiency {percent(lost.computing, 1)}: latency {percent(lost.latency, 1)}, "
            f"bandwidth {percent(lost.carrying, 1)}, jitter {percent(lost.jitter, 1)}"
            + (f", input {percent(lost.images, 1)}" if lost.images else "")
        )


def parts_of(step: SimulatedStep) -> list[tuple[str, str, float]]:
    return [
        ("█", "forward", step.forward_s),
        ("▓", "backward", step.backward_s),
        ("▒", "update", step.update_s),
        ("░", "exposed all-reduce", step.exposed_s),
        ("·", "jitter", step.jitter_s),
        ("-", "input", step.input_s),
    ]


def bar(step: SimulatedStep) -> str:
    """Return a bar of BAR characters, divided in proportion to the parts of a step."""
    marks, past_s = "", 0.0
    for mark, _, part_s in parts_of(step):
        past_s += part_s
        marks += mark * (round(BAR * past_s / step.total_s) - len(marks))
    return marks


def print_changes(console: Terminal, result: Simulated) -> None:
    console.title(f"gain of one change at {ranks_of(result)}")
    found = changes(result)
    for change in found:
        console.print(
            f"{'+' + three_digits(change.gained):>11} images/s {100 * change.share:>+6.1f} %  {one_line(change.label)}"
        )
    if not found:
        console.print("none of these changes gains half a percent")


def print_faults(console: Terminal, training: SimulatedTraining) -> None:
    if training.num_interruptions > MATTERS and training.checkpoint_minutes is not None:
        console.title(
            "interruptions",
            f"{three_digits(training.num_interruptions)} expected; a checkpoint every "
            f"{duration(60 * training.checkpoint_minutes)} costs least (Young 1974, Daly 2006); "
            f"checkpoints, repeated steps and restarts then take {duration(training.faults_s)} of "
            f"{duration(training.total_s)}",
        )


def answer(search: Search, within: str) -> str:
    if search.found:
        return (
            f"{nodes(search.found)} finish in {duration(60 * (search.found.minutes or 0.0))}: "
            f"the smallest number of whole nodes that divides the batch evenly and finishes within {within}"
        )
    lost = losses(search.fastest)
    waits = {
        "the latency of the all-reduce": lost.latency,
        "the bandwidth of the all-reduce": lost.carrying,
        "jitter": lost.jitter,
        "reading images": lost.images,
    }
    limit = max(waits, key=lambda name: waits[name])
    why = f"{limit} ({percent(waits[limit], 1)} of a step), which grows with more ranks"
    if search.fastest.scenario.num_ranks == search.most_ranks:
        why = f"computing ({percent(lost.computing, 1)} of a step); more ranks were not tried"
    return (
        f"no number of ranks finishes within {within}; the fastest, {nodes(search.fastest)}, takes "
        f"{duration(60 * (search.fastest.minutes or 0.0))}, limited by {why}"
    )


def training_of(result: Simulated) -> SimulatedTraining | None:
    return result.training


def usd_of(result: Simulated) -> float | None:
    return result.training.usd if result.training else None


def print_variants(
    job: Job, cluster: Cluster, variants: Sequence[Variant], ranks: Sequence[int], remarks: Sequence[str]
) -> None:
    """Print every variant for each number of ranks; the best algorithm is marked."""
    console = begin(job, cluster, remarks)
    heading = next(iter(variants[0].varied))
    marks_best = heading == "algorithm"
    # There is no room for all columns: time and cost are worth more than the interval and the number of buckets.
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
                in_ms(result.step.total_s),
                three_digits(result.images_per_s),
                percent(result.efficiency, 1),
                in_ms(result.step.exposed_s),
                three_digits(result.minutes) if training else interval(result),
                three_digits(training.usd) if training else str(len(result.step.buckets)),
                algorithms(result) + " *" * (result is best and marks_best),
            )
    console.print(table)
    print_assumed(console, cluster)


def print_ladder(
    job: Job, cluster: Cluster, variants: Sequence[Variant], ranks: Sequence[int], remarks: Sequence[str]
) -> None:
    """Print each improvement compared with the previous line and with the first."""
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
                in_ms(result.step.total_s),
                three_digits(result.images_per_s),
                percent(result.efficiency, 1),
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
