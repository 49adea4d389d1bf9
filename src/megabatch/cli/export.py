"""megabatch export: a run's model as torch.export program, ONNX or torchvision weights."""

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import ModelOption
from megabatch.errors import UserError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    torch: Annotated[
        Path | None, typer.Option("--torch", metavar="OUT", help="Write a torch.export program, such as model.pt2.")
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="OUT", help="Write ONNX; needs pip install 'megabatch\\[export]'.")
    ] = None,
    torchvision: Annotated[
        Path | None, typer.Option("--torchvision", metavar="OUT", help="Write a state dict with torchvision's names.")
    ] = None,
    preprocessing: Annotated[
        bool,
        typer.Option("--preprocessing", help="Include normalisation: it takes uint8 images \\[N, C, S, S]."),
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="last|best", help="Export this checkpoint instead of the final model.")
    ] = None,
    model: ModelOption = None,
) -> None:
    """Export a run's model with one or more of --torch, --onnx and --torchvision."""
    if not (torch or onnx or torchvision):
        raise UserError(f"megabatch export {run}: no format is given; add --torch OUT, --onnx OUT or --torchvision OUT")
    for out in (torch, onnx, torchvision):
        if out and not out.parent.is_dir():
            raise UserError(f"{out} cannot be written: the folder {out.parent} does not exist; create it first")
        if out and out.is_dir():
            raise UserError(f"{out} cannot be written: it is a folder; give the path of a file")
    from megabatch.inference.classifier import load
    from megabatch.inference.export import CHECKED_IMAGES, Exported, export_onnx, export_torch, export_torchvision
    from megabatch.io.disk import remedy
    from megabatch.io.terminal import Terminal

    classifier = load(run, checkpoint=checkpoint, model=model)
    exported = Exported(
        center_crop=classifier.card.center_crop,
        network=classifier.network,
        mean=list(classifier.card.mean),
        deviation=list(classifier.card.deviation),
        classes=list(classifier.classes),
        image_size=classifier.image_size,
        num_channels=classifier.num_channels,
        preprocessing_inside=preprocessing,
    )
    size = f"{exported.num_channels}, {exported.image_size}, {exported.image_size}"
    takes = f"uint8 [N, {size}]" if preprocessing else f"float32 [N, {size}], normalised"
    console = Terminal()
    try:
        for name, out, write in (("torch", torch, export_torch), ("onnx", onnx, export_onnx)):
            if out:
                difference = write(exported, out)
                line = f"{out}: takes {takes}; scores on {CHECKED_IMAGES} images of noise agree to {difference:.0e}"
                console.row(name, line, width=11)
        if torchvision:
            line = f"{torchvision}: {export_torchvision(exported, torchvision)}"
            console.row("torchvision", line, width=11)
    except OSError as error:
        place = error.filename or out or torchvision
        raise UserError(f"{place} cannot be written ({error.strerror or error}); {remedy(error)}") from None
