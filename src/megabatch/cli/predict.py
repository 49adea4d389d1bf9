"""megabatch predict: the most likely classes of images."""

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import MOST, ModelOption
from megabatch.errors import UserError
from megabatch.text import one_line, print_line, print_text

if TYPE_CHECKING:
    from megabatch.inference.predict import Prediction


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or its model.safetensors.")],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|FOLDER|-...", help="Images or folders; - reads standard input."),
    ],
    top: Annotated[int, typer.Option(min=1, max=MOST, help="Number of classes to print per image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV with the columns image, rank, class, probability.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="best, last or step-N. Default: the final model.", show_default=False)
    ] = None,
    model: ModelOption = None,
) -> None:
    """Print the most likely classes of images with their probabilities."""
    from megabatch.inference.classifier import load
    from megabatch.inference.predict import find_images
    from megabatch.inference.predict import predict as predict_images
    from megabatch.ranks.machine import usable_cores

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other; use one of them")
    files = find_images(images)
    predictions = predict_images(load(run, checkpoint, model=model), files, top, threads=len(usable_cores()))
    write = write_json if as_json else write_csv if as_csv else write_text
    if not write(predictions):
        sys.exit(1)


def write_text(predictions: "Iterable[Prediction]") -> bool:
    any_read = False
    for found in predictions:
        any_read |= found.problem is None
        if found.problem:
            print_problem(found)
        else:
            classes = ", ".join(f"{name} {share:.1%}" for name, share in found.classes)
            print_line(f"{found.image}: {classes}")
    return any_read


def write_json(predictions: "Iterable[Prediction]") -> bool:
    any_read = False
    for found in predictions:
        any_read |= found.problem is None
        row: dict[str, object] = {"image": found.image}
        if found.problem:
            row["error"] = found.problem
        else:
            row["classes"] = [{"class": name, "probability": share} for name, share in found.classes]
        print_text(json.dumps(row))
    return any_read


def write_csv(predictions: "Iterable[Prediction]") -> bool:
    any_read = False
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["image", "rank", "class", "probability"])
    for found in predictions:
        any_read |= found.problem is None
        if found.problem:
            print_problem(found)
        for rank, (name, share) in enumerate(found.classes, 1):
            table.writerow([found.image, rank, one_line(name), share])
    return any_read


def print_problem(found: "Prediction") -> None:
    print_line(f"megabatch: {found.image} cannot be read: {found.problem}", to_stderr=True)
