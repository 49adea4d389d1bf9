"""megabatch eval: the accuracy of a run's saved weights."""

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import ModelOption, require_folder_of
from megabatch.data.settings import TestViews
from megabatch.errors import UserError
from megabatch.planning.sizes import LARGEST, SMALLEST


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Other images: a folder of class folders, or the test images of a source."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="best, last or step-N. Default: the final model.", show_default=False)
    ] = None,
    model: ModelOption = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=SMALLEST, max=LARGEST, help="Side of the images. Default: that of the run's evaluations."),
    ] = None,
    views: Annotated[
        TestViews | None,
        typer.Option(
            help="Average the scores of these views of an image. Default: those of the run.", show_default=False
        ),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="The same as --views mirror.")] = False,
    confusion: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the confusion matrix to this CSV file.")
    ] = None,
) -> None:
    """Evaluate the saved weights of a run."""
    require_folder_of(confusion, "--confusion")
    if flip and views:
        raise UserError(f"--flip and --views {views} cannot be combined; use one of them")
    from megabatch.inference.evaluate import evaluate_run
    from megabatch.io.terminal import Terminal
    from megabatch.text import one_line

    views = "mirror" if flip else views
    result, names = evaluate_run(run, data, checkpoint, model, image_size, views, confusion)
    console = Terminal()
    ranked = "" if result.mean_average_precision is None else f"mAP {result.mean_average_precision:.4f}, "
    console.print(
        f"{ranked}top-1 {result.top1:.4f}, top-5 {result.top5:.4f}, loss {result.test_loss:.6f} "
        f"on {result.samples_evaluated:,} samples"
    )
    for line in result.unreadable:
        console.print(one_line(f"left out: {line}"))
    console.print(
        f"precision {result.precision:.4f}, balanced accuracy {result.balanced_accuracy:.4f}, F1 {result.f1:.4f} "
        "(means over classes)" + ("" if result.ece is None else f", calibration error {result.ece:.4f}")
    )
    console.print(f"  {'class':<16} recall precision")
    for name, *shares in zip(names, result.class_top1, result.class_precision, strict=True):
        console.print(f"  {one_line(name):<16} " + " ".join("-     " if s is None else f"{s:.4f}" for s in shares))
