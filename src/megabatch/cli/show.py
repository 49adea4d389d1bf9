"""megabatch show: what a recipe resolves to, before anything runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import (
    Arguments,
    ClusterOption,
    ProfileOption,
    Ranks,
    choose_ranks,
    count_devices,
    require_named_model,
    split_arguments_or_run,
)
from megabatch.errors import UserError
from megabatch.text import one_line, print_text

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.io.terminal import Terminal
    from megabatch.preflight.preview import Devices, Preview

BLOCKS = " ▁▂▃▄▅▆▇█"


def show(
    given: Arguments = None,
    ranks: Ranks = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the recipe alone, as a file to start from.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="List every parameter of the model.")] = False,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
) -> None:
    """Show what a recipe resolves to: how to start it, its settings, batch, learning rates, parameter groups, memory.

    [bold]megabatch show[/bold] resnet50-imagenet-4k --ranks 8

    It needs neither the images nor the ranks.
    """
    from megabatch.config.loading import load_config

    recipe, overrides = split_arguments_or_run(given)
    config = load_config(recipe, overrides, needs_source=toml)
    if toml:
        print_text(config.to_toml().rstrip("\n"))
        return
    require_named_model(config, recipe, overrides)
    num_ranks = choose_ranks(config, ranks)
    time = expected_time(config, num_ranks, cluster, profile)
    print_preview(config, num_ranks, [recipe, *overrides], needs_images=False, lists_parameters=parameters, time=time)


def print_preview(
    config: "RunConfig",
    num_ranks: int,
    arguments: Sequence[str],  # of the `megabatch train` that would run it
    needs_images: bool = True,
    lists_parameters: bool = False,
    time: str = "",  # that is expected on some cluster
) -> None:
    from rich.syntax import Syntax

    from megabatch.io.terminal import Terminal
    from megabatch.preflight.preview import Devices, preview
    from megabatch.ranks.world import choose_device
    from megabatch.training.device import warn_of_device

    seen = preview(config, num_ranks, needs_images)
    device_type = choose_device(config.run.device)
    is_telling = device_type != "cpu" or config.run.device == "cpu"
    here = Devices(device_type, count_devices(device_type), is_telling)
    plan = seen.plan
    console = Terminal()

    console.title("start")
    for name, text in answer(config, seen, arguments, here, time).items():
        console.print(one_line(f"{name:<9} {text}"))
    console.title("recipe")
    console.print(Syntax(config.to_toml().strip(), "toml", background_color="default"))
    console.title("batch")
    console.print(
        f"global {plan.global_batch:,} = micro {plan.microbatch:,} x accumulation {plan.accumulation:,} "
        f"x ranks {plan.num_ranks:,}"
    )
    console.print(describe_steps(config, seen))
    console.title("learning rate")
    if seen.has_images:
        console.print(draw_curve(seen.learning_rate, config.optim.learning_rate, plan.num_steps), end="")
    elif config.train.steps is None:
        ends = ("epoch 0", f"epoch {config.train.epochs:g}")
        console.print(draw_curve(seen.learning_rate, config.optim.learning_rate, plan.num_steps, ends), end="")
    else:
        console.print(f"peak {config.optim.learning_rate:g}; how long its warm-up is depends on the number of images")
    if lists_parameters:
        console.title("parameters")
        print_parameters(console, seen)
    console.title("parameter groups")
    print_groups(console, seen)
    console.title("memory of a rank")
    print_memory(console, seen)
    console.title("preflight")
    for line in seen.findings.references:
        console.print(f"reference  {one_line(line)}")
    if not seen.has_images:
        console.print("reference  not compared before the images are there")
    for line in [*seen.findings.warnings, *warn_of_device(config.precision, here.kind_for(num_ranks))]:
        console.print(f"warning    {one_line(line)}")


def answer(
    config: "RunConfig", seen: "Preview", arguments: Sequence[str], here: "Devices", time: str = ""
) -> dict[str, str]:
    """What whoever has the machines wants to know first."""
    from megabatch.preflight.preview import ASSUMED_CLASSES, start_commands

    plan, memory = seen.plan, seen.memory
    if not seen.has_images:
        kept = [argument for argument in arguments if not argument.startswith("data.source=")]
        arguments = [*kept, "data.source=FOLDER"]
    first, *others = start_commands(arguments, plan.num_ranks, here)
    a_rank = "a rank" if here.kind_for(plan.num_ranks) == "cpu" else "a GPU"
    beside = "activations not included" if memory.activations is None else "beside the data set and torch itself"
    lines = {"command": first} | ({"or": others[0]} if others else {})
    lines["batch"] = (
        f"{plan.microbatch * plan.accumulation:,} images a step on {a_rank}: "
        f"{plan.accumulation:,} of {plan.microbatch:,}, accumulated"
        if plan.accumulation > 1
        else f"{plan.microbatch:,} images a step on {a_rank}, without accumulation"
    )
    lines["memory"] = f"{memory.total / 1e6:,.0f} MB on {a_rank}, {beside}"
    if seen.has_images:
        images = plan.num_steps * plan.global_batch
        lines["an epoch"] = f"{plan.num_samples:,} images, {1 / plan.epochs_after(1):,.1f} steps"
        unknown = (
            "how long that takes is not known before it was run (megabatch doctor measures images/s; "
            "--cluster says what to expect)"
        )
        lines["time"] = f"{plan.num_steps:,} steps, {images:,} images; {time or unknown}"
    else:
        source = f"data.source={config.data.source!r} is not there" if config.data.source else "data.source is not set"
        lines["missing"] = (
            f"{source}: give data.source=FOLDER, with a folder of images for each class; "
            f"until then {ASSUMED_CLASSES} classes are assumed, and steps are not known"
        )
        lines["time"] = time or "not known before it was run"
    return lines


def expected_time(config: "RunConfig", num_ranks: int, cluster: str | None, profile: Path | None) -> str:
    """As `megabatch simulate` predicts it; of no cluster, nothing."""
    from megabatch.cli.simulate_screen import duration, figures
    from megabatch.preflight.preview import job_of_recipe
    from megabatch.simulate.job import with_profile
    from megabatch.simulate.load import load_cluster
    from megabatch.simulate.profile import read_profile
    from megabatch.simulate.scenario import simulate

    if cluster is None:
        if profile:
            raise UserError(
                f"--profile {profile} says what a rank takes, and not what lies between them; add --cluster"
            )
        return ""
    job, has_images = job_of_recipe(config)
    if profile:
        job = with_profile(job, read_profile(profile))
    there = load_cluster(cluster)
    result = simulate(job.scenario(there, num_ranks))
    assert result.training and result.minutes is not None and result.rank_hours is not None
    low, high = (result.minutes * step_s / result.step.total_s for step_s in (result.low_step_s, result.high_step_s))
    cost = f"{figures(result.rank_hours)} rank-hours"
    cost += f", {figures(result.training.usd)} USD" if result.training.usd is not None else ""
    assumed = "" if has_images else ", with as many images as ImageNet has"
    devices = f"ranks as in {profile}" if profile else there.device.name
    return (
        f"about {duration(result.minutes)} ({duration(low)} to {duration(high)}) on {num_ranks:,} {devices} "
        f"of {there.name}, {cost}{assumed} (megabatch simulate says more)"
    )


def describe_steps(config: "RunConfig", seen: "Preview") -> str:
    from megabatch.config.resolve import describe_epochs

    plan = seen.plan
    if not seen.has_images:
        return f"{config.train.length}; steps an epoch = images / {plan.global_batch:,}"
    per_epoch = f"{1 / plan.epochs_after(1):.1f} steps an epoch"
    if config.train.steps is not None:
        epochs = describe_epochs(config, plan.num_samples)
        return f"{plan.num_steps:,} steps (train.steps) = {epochs} of {plan.num_samples:,} samples; {per_epoch}"
    return (
        f"{plan.num_steps:,} steps = floor({config.train.length} x {plan.num_samples:,} samples "
        f"/ {plan.global_batch:,}); {per_epoch}"
    )


def print_groups(console: "Terminal", seen: "Preview") -> None:
    from megabatch.io.terminal import plain_table

    table = plain_table()
    table.add_column("group")
    for column in ("decay", "tensors", "parameters"):
        table.add_column(column, justify="right")
    for group in seen.groups:
        count = sum(parameter.numel() for parameter in group["params"])
        table.add_row(group["name"], f"{group['weight_decay']:g}", f"{len(group['params']):,}", f"{count:,}")
    console.print(table)


def print_memory(console: "Terminal", seen: "Preview") -> None:
    memory = seen.memory
    console.print(f"weights      {megabytes(memory.weights)}")
    if memory.master_weights:
        console.print(f"fp32 weights {megabytes(memory.master_weights)}  master weights, which the optimizer updates")
    console.print(f"gradients    {megabytes(memory.gradients)}  ({memory.gradients:,} bytes to all-reduce a step)")
    if memory.unscaled:
        console.print(f"unscaled     {megabytes(memory.unscaled)}  gradients in fp32")
    console.print(f"optimizer    {megabytes(memory.optimizer)}")
    if memory.activations is None:
        console.print("activations     unknown: the model does not run without real images")
    else:
        console.print(f"activations  {megabytes(memory.activations)}  of one microbatch")
    console.print(f"expected     {megabytes(memory.total)}  beside the data set and torch itself")


def print_parameters(console: "Terminal", seen: "Preview") -> None:
    from megabatch.io.terminal import plain_table

    table = plain_table()
    for column in ("parameter", "shape", "group", "decay", "trust ratio"):
        table.add_column(column, no_wrap=True)
    for row in seen.parameters:
        shape = "x".join(map(str, row.shape)) or "1"
        table.add_row(row.name, shape, row.group, f"{row.weight_decay:g}", "yes" if row.trust_ratio else "no")
    console.print(table)


def megabytes(count: int) -> str:
    return f"{count / 1e6:10,.2f} MB"


def draw_curve(
    value: Callable[[int], float],
    peak: float,
    num_steps: int,
    ends: tuple[str, str] | None = None,  # what the axis says below its first and last step
    width: int = 64,
    height: int = 6,
) -> str:
    """The values at evenly spaced steps, as rows of blocks with the axis on the left."""
    columns = min(width, num_steps)
    steps = [round(column * (num_steps - 1) / max(1, columns - 1)) for column in range(columns)]
    values = [value(step) for step in steps]
    highest = max(*values, peak)
    rows = []
    for row in range(height - 1, -1, -1):
        levels = [min(8, max(0, round(8 * (height * value / highest - row)))) for value in values]
        label = f"{highest * (row + 1) / height:>9.4g}" if row in (0, height - 1) else " " * 9
        rows.append(f"{label} │{''.join(BLOCKS[level] for level in levels).rstrip()}")
    begin, last = ends or ("step 1", f"step {num_steps:,}")
    rows.append(f"{'':>9} └{'─' * columns}")
    rows.append(f"{'':>9}  {begin}{last:>{max(len(last) + 1, columns - len(begin))}}")
    rows.append(f"{'':>9}  first {values[0]:.4g}, peak {highest:.4g}, last {values[-1]:.4g}")
    return "\n".join(rows) + "\n"
