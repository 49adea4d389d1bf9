"""megabatch eval: the figures of a run's summary, again, from the weights that it left."""

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import ModelOption


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    data: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Other images: a folder of class folders, or a source's test part."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="best, last or step-...; by default the final model.", show_default=False)
    ] = None,
    model: ModelOption = None,
) -> None:
    """Evaluate a run again from its saved weights."""
    from megabatch.inference.evaluate import evaluate_run
    from megabatch.io.terminal import Terminal
    from megabatch.text import one_line

    result, names = evaluate_run(run, data, checkpoint, model)
    console = Terminal()
    console.print(
        f"top-1 {result.top1:.4f}, top-5 {result.top5:.4f}, loss {result.test_loss:.6f} "
        f"on {result.samples_evaluated:,} samples"
    )
    for line in result.unreadable:
        console.print(one_line(f"left out: {line}"))
    for name, top1 in zip(names, result.class_top1, strict=True):
        console.print(f"  {one_line(name):<16} {'-' if top1 is None else f'{top1:.4f}'}")
