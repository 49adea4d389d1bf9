"""megabatch show: what a recipe resolves to, before anything runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import Arguments, Ranks, split_arguments
from megabatch.cli.ranks import choose_ranks

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig

BLOCKS = " ▁▂▃▄▅▆▇█"


def show(
    given: Arguments = None,
    ranks: Ranks = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the recipe alone, as a file to start from.")] = False,
) -> None:
    """Show what a recipe resolves to: settings, batch arithmetic, learning rates, parameter groups, memory."""
    from megabatch.config.loading import load_config

    config = load_config(*split_arguments(given))
    if toml:
        print(config.to_toml(), end="")
        return
    print_preview(config, choose_ranks(config, ranks))


def print_preview(config: "RunConfig", num_ranks: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.syntax import Syntax
    from rich.table import Table

    from megabatch.preflight.preview import preview

    seen = preview(config, num_ranks)
    plan, memory = seen.plan, seen.memory
    console = Console(highlight=False, soft_wrap=True)

    def title(text: str) -> None:
        console.print(f"\n[bold]{text}[/bold]")

    title("recipe")
    console.print(Syntax(config.to_toml().strip(), "toml", background_color="default"))
    title("batch")
    console.print(
        f"global {plan.global_batch:,} = micro {plan.microbatch:,} x accumulation {plan.accumulation:,} "
        f"x ranks {plan.num_ranks:,}"
    )
    console.print(
        f"{plan.num_steps:,} steps = floor({config.train.epochs:g} epochs x {plan.num_samples:,} samples "
        f"/ {plan.global_batch:,}); {1 / plan.epochs_after(1):.1f} steps an epoch"
    )
    title("learning rate")
    console.print(draw_curve(seen.learning_rate, config.optim.learning_rate, plan.num_steps), end="")
    title("parameters")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("parameter", "shape", "group", "decay", "trust ratio"):
        table.add_column(column, no_wrap=True)
    for row in seen.parameters:
        shape = "x".join(map(str, row.shape)) or "1"
        table.add_row(row.name, shape, row.group, f"{row.weight_decay:g}", "yes" if row.trust_ratio else "no")
    console.print(table)
    title("parameter groups")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("group")
    for column in ("decay", "tensors", "parameters"):
        table.add_column(column, justify="right")
    for group in seen.groups:
        count = sum(parameter.numel() for parameter in group["params"])
        table.add_row(group["name"], f"{group['weight_decay']:g}", f"{len(group['params']):,}", f"{count:,}")
    console.print(table)
    title("memory of a rank")
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
    title("preflight")
    for line in seen.findings.references:
        console.print(f"reference  {escape(line)}")
    for line in seen.findings.warnings:
        console.print(f"warning    {escape(line)}")


def megabytes(count: int) -> str:
    return f"{count / 1e6:10,.2f} MB"


def draw_curve(value: Callable[[int], float], peak: float, num_steps: int, width: int = 64, height: int = 6) -> str:
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
    last = f"step {num_steps:,}"
    rows.append(f"{'':>9} └{'─' * columns}")
    rows.append(f"{'':>9}  step 1{last:>{max(len(last) + 1, columns - 6)}}")
    rows.append(f"{'':>9}  first {values[0]:.4g}, peak {highest:.4g}, last {values[-1]:.4g}")
    return "\n".join(rows) + "\n"
