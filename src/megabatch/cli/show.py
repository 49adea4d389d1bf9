"""megabatch show: a recipe with all its values, before it runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

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
from megabatch.io.numbers import duration, in_mb, megabytes, three_digits
from megabatch.text import one_line, print_text

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.io.terminal import Terminal
    from megabatch.preflight.preview import Devices, Preview

BLOCKS = " ▁▂▃▄▅▆▇█"


class Prediction(NamedTuple):
    """The speed of a run on a cluster, as `megabatch simulate` predicts it."""

    time: str
    images_per_s: dict[int, float]  # by the side of the training images


def show(
    given: Arguments = None,
    ranks: Ranks = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print only the recipe, as TOML.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="List all parameters of the model.")] = False,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
) -> None:
    """Show a recipe: how to start it, its settings, batch, learning rates, parameter groups and memory.

    [bold]megabatch show[/bold] resnet50-imagenet-4k --ranks 8

    It needs neither the images nor the devices.
    """
    from megabatch.config.loading import load_config

    recipe, overrides = split_arguments_or_run(given)
    config = load_config(recipe, overrides, needs_source=toml)
    if toml:
        print_text(config.to_toml().rstrip("\n"))
        return
    require_named_model(config, recipe, overrides)
    num_ranks = choose_ranks(config, ranks)
    predicted = predict(config, num_ranks, cluster, profile)
    arguments = [recipe, *overrides]
    print_preview(config, num_ranks, arguments, needs_images=False, lists_parameters=parameters, predicted=predicted)


def print_preview(
    config: "RunConfig",
    num_ranks: int,
    arguments: Sequence[str],  # of `megabatch train`
    needs_images: bool = True,
    lists_parameters: bool = False,
    predicted: Prediction | None = None,  # for a cluster
) -> None:
    from rich.syntax import Syntax

    from megabatch.io.terminal import Terminal
    from megabatch.preflight.preview import Devices, preview
    from megabatch.ranks.devices import choose_device
    from megabatch.training.device import warn_of_device

    seen = preview(config, num_ranks, needs_images)
    device_type = choose_device(config.run.device)
    is_known = device_type != "cpu" or config.run.device == "cpu"
    here = Devices(device_type, count_devices(device_type), is_known)
    plan = seen.plan
    console = Terminal()

    console.title("start")
    for name, text in answer(config, seen, arguments, here, predicted).items():
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
        console.print(f"peak {config.optim.learning_rate:g}; the length of its warm-up depends on the number of images")
    if config.data.sizes or config.data.test_image_size:
        console.title("image sizes")
        print_sizes(console, config, seen, predicted)
    if lists_parameters:
        console.title("parameters")
        print_parameters(console, seen)
    console.title("parameter groups")
    print_groups(console, seen)
    console.title("memory per rank")
    print_memory(console, seen)
    console.title("preflight")
    for line in seen.findings.references:
        console.print(f"reference  {one_line(line)}")
    if not seen.has_images:
        console.print("reference  compared as if the images, which are missing, were those of ImageNet")
    for line in [*seen.findings.warnings, *warn_of_device(config.precision, here.kind_for(num_ranks))]:
        console.print(f"warning    {one_line(line)}")


def answer(
    config: "RunConfig", seen: "Preview", arguments: Sequence[str], here: "Devices", predicted: Prediction | None = None
) -> dict[str, str]:
    """Return the most important facts by name: the command, and the batch, memory and time of the run."""
    from megabatch.preflight.preview import ASSUMED_CLASSES, start_commands

    plan, memory = seen.plan, seen.memory
    if not seen.has_images:
        others = [argument for argument in arguments if not argument.startswith("data.source=")]
        arguments = [*others, "data.source=FOLDER"]
    first, *alternatives = start_commands(arguments, plan.num_ranks, here)
    a_rank = "a rank" if here.kind_for(plan.num_ranks) == "cpu" else "a GPU"
    beside = "without activations" if memory.activations is None else "without the data set and torch"
    lines = {"command": first} | ({"or": alternatives[0]} if alternatives else {})
    lines["batch"] = (
        f"{plan.microbatch * plan.accumulation:,} images per step on {a_rank}: "
        f"{plan.accumulation:,} microbatches of {plan.microbatch:,}"
        if plan.accumulation > 1
        else f"{plan.microbatch:,} images per step on {a_rank}, without accumulation"
    )
    lines["memory"] = f"{megabytes(memory.total / 1e6)} on {a_rank}, {beside}"
    if seen.has_images:
        images = plan.num_steps * plan.global_batch
        lines["an epoch"] = f"{plan.num_samples:,} images, {1 / plan.epochs_after(1):,.1f} steps"
        unknown = (
            "the duration is unknown: megabatch doctor measures images/s here, --cluster NAME predicts it elsewhere"
        )
        lines["time"] = f"{plan.num_steps:,} steps, {images:,} images; {predicted.time if predicted else unknown}"
    else:
        source = (
            f"data.source={config.data.source!r} does not exist" if config.data.source else "data.source is not set"
        )
        lines["missing"] = (
            f"{source}; set data.source=FOLDER, with one folder of images per class. "
            f"This preview assumes {ASSUMED_CLASSES} classes and does not know the number of steps"
        )
        lines["time"] = predicted.time if predicted else "unknown"
    return lines


def predict(config: "RunConfig", num_ranks: int, cluster: str | None, profile: Path | None) -> Prediction | None:
    """Return the prediction of `megabatch simulate`, or None without a cluster."""
    from megabatch.preflight.preview import job_of_recipe
    from megabatch.simulate.job import with_profile
    from megabatch.simulate.load import load_cluster
    from megabatch.simulate.profile import read_profile
    from megabatch.simulate.scenario import simulate

    if cluster is None:
        if profile:
            raise UserError(f"--profile {profile} describes a rank but not the links between ranks; add --cluster")
        return None
    job, has_images = job_of_recipe(config)
    if profile:
        job = with_profile(job, read_profile(profile))
    there = load_cluster(cluster)
    result = simulate(job.scenario(there, num_ranks))
    assert result.training and result.rank_hours is not None
    expected_s, step_s = result.training.total_s, result.step.total_s
    low, high = (duration(expected_s * bound_s / step_s) for bound_s in (result.low_step_s, result.high_step_s))
    cost = f"{three_digits(result.rank_hours)} rank-hours"
    cost += f", {three_digits(result.training.usd)} USD" if result.training.usd is not None else ""
    assumed = "" if has_images else ", assuming the images of ImageNet"
    devices = f"ranks as in {profile}" if profile else there.device.name
    time = f"about {duration(expected_s)} ({low} to {high}) on {num_ranks:,} {devices} of {there.name}, {cost}{assumed}"
    seconds = {config.data.image_size: step_s} | {each.stage.side: each.step.total_s for each in result.stages}
    return Prediction(
        time=f"{time}; for details: megabatch simulate",
        images_per_s={side: config.batch.global_batch / each_s for side, each_s in seconds.items()},
    )


def describe_steps(config: "RunConfig", seen: "Preview") -> str:
    from megabatch.config.resolve import describe_epochs

    plan = seen.plan
    if not seen.has_images:
        return f"{config.train.length}; steps per epoch = images / {plan.global_batch:,}"
    per_epoch = f"{1 / plan.epochs_after(1):.1f} steps per epoch"
    if config.train.steps is not None:
        epochs = describe_epochs(config, plan.num_samples)
        return f"{plan.num_steps:,} steps (train.steps) = {epochs} of {plan.num_samples:,} samples; {per_epoch}"
    return (
        f"{plan.num_steps:,} steps = floor({config.train.length} x {plan.num_samples:,} samples "
        f"/ {plan.global_batch:,}); {per_epoch}"
    )


def print_sizes(console: "Terminal", config: "RunConfig", seen: "Preview", predicted: Prediction | None) -> None:
    from megabatch.io.terminal import plain_table
    from megabatch.planning.sizes import base_epochs

    table = plain_table()
    for column in ("side", "from step", "steps", "epochs", "activations MB", *["images/s"] * bool(predicted)):
        table.add_column(column, justify="right")
    for row in seen.stages:
        stage, memory = row.stage, "unknown" if row.activations is None else in_mb(row.activations)
        steps = (
            (f"{stage.first_step + 1:,}", f"{stage.num_steps:,}", f"{row.epochs:.2f}") if seen.has_images else 3 * "?"
        )
        cells = [str(stage.side), *steps, memory]
        if predicted:  # for the images of ImageNet, whose number of steps may leave out a short stage
            speed = predicted.images_per_s.get(stage.side)
            cells.append("?" if speed is None else three_digits(speed))
        table.add_row(*cells)
    console.print(table)
    console.print(f"tested at {config.data.test_side} pixels")
    if seen.has_images:
        work = base_epochs([row.stage for row in seen.stages], seen.plan.epochs_after(1))
        console.print(f"equivalent to {work:.1f} epochs at 224 pixels")


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
    console.print(f"weights      {in_mb(memory.weights):>10} MB")
    if memory.master_weights:
        console.print(f"fp32 weights {in_mb(memory.master_weights):>10} MB  master weights, updated by the optimizer")
    console.print(f"gradients    {in_mb(memory.gradients):>10} MB  ({memory.gradients:,} bytes to all-reduce per step)")
    if memory.unscaled:
        console.print(f"unscaled     {in_mb(memory.unscaled):>10} MB  gradients in fp32")
    console.print(f"optimizer    {in_mb(memory.optimizer):>10} MB")
    if memory.average:
        console.print(f"average      {in_mb(memory.average):>10} MB  of the weights (train.ema_half_life_epochs)")
    if memory.activations is None:
        console.print("activations     unknown: the model cannot run without real images")
    else:
        console.print(f"activations  {in_mb(memory.activations):>10} MB  for one microbatch")
    console.print(f"expected     {in_mb(memory.total):>10} MB  without the data set and torch")


def print_parameters(console: "Terminal", seen: "Preview") -> None:
    from megabatch.io.terminal import plain_table

    table = plain_table()
    for column in ("parameter", "shape", "group", "decay", "trust ratio"):
        table.add_column(column, no_wrap=True)
    for row in seen.parameters:
        shape = "x".join(map(str, row.shape)) or "1"
        table.add_row(row.name, shape, row.group, f"{row.weight_decay:g}", "yes" if row.trust_ratio else "no")
    console.print(table)


def draw_curve(
    value: Callable[[float], float],
    peak: float,
    num_steps: int,
    ends: tuple[str, str] | None = None,  # labels of the first and last step
    width: int = 64,
    height: int = 6,
) -> str:
    """Return a chart of the values at evenly spaced steps, drawn with block characters."""
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
