"""Evaluation of a run's saved weights."""

import csv
import io
from functools import partial
from pathlib import Path

import msgspec
import torch

from megabatch.config.loading import load_config, silent
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import FROM_PYTHON, NAMED_SOURCES, load_data_set, load_other_images
from megabatch.data.pipeline.images import ImageSet
from megabatch.errors import UserError
from megabatch.inference.classifier import make_classifier
from megabatch.io.disk import remedy
from megabatch.models.catalog import model_errors
from megabatch.precision.policy import PrecisionSettings
from megabatch.ranks.devices import choose_device
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.world import connect
from megabatch.runs.files import CONFIG
from megabatch.runs.model_card import ModelCard
from megabatch.runs.reader import is_run, started_in
from megabatch.runs.records import MOST_CLASSES, Evaluation
from megabatch.text import expand_home
from megabatch.training.checkpoint.weights import find_weights
from megabatch.training.evaluate import MistakeCounter, evaluate, evaluate_labels, require_evaluable
from megabatch.training.numerics import arithmetic, set_cublas_workspace

IMAGE_SIZE = "data.test_image_size="


def evaluate_run(
    folder: Path,
    source: str | None,
    checkpoint: str | None = None,
    model: str | None = None,
    image_size: int | None = None,
    views: str | None = None,
    confusion: Path | None = None,
) -> tuple[Evaluation, tuple[str, ...]]:
    """Evaluate on the run's test images, or on those of another source, prepared as in the run's evaluations.

    It uses the threads and batches of the run, so that the logits and all results are bitwise identical, unless another
    `image_size` or other `views` are given.

    Returns:
        The evaluation and the names of the classes.
    """
    if not is_run(folder):
        raise UserError(f"{folder} is not a run's folder; megabatch runs lists runs")
    config = load_config(str(folder / CONFIG), report=silent)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{folder} was started from Python, which holds its model and images; evaluate it there")
    weights = find_weights(folder, checkpoint)
    if confusion and len(weights.card.classes) > MOST_CLASSES:
        raise UserError(
            f"--confusion {confusion}: {len(weights.card.classes):,} classes; the limit is {MOST_CLASSES:,}; omit it"
        )
    test_image_size = image_size or weights.card.test_image_size
    # Images that cannot be read are left out and listed.
    data = msgspec.structs.replace(config.data, test_image_size=test_image_size, on_error="skip")
    config = msgspec.structs.replace(config, data=data)
    threads = config.run.decode_threads or 1
    if source:
        test, sets = other_images(config, source, weights.card, threads)
    else:
        test, sets = own_images(config, folder, weights.card)
    if confusion and sets is not None:
        raise UserError(f"--confusion {confusion}: an image may have several labels (data.multi_label=true); omit it")
    torch.set_num_threads(config.run.threads or 1)
    device = choose_device(config.run.device)
    set_cublas_workspace(config.run.deterministic, device)
    with (
        connect(RankInfo(0, 1, 0, 1), device) as world,
        arithmetic(PrecisionSettings(name=weights.card.precision), config.run.deterministic),
    ):
        classifier = make_classifier(weights, world.device, named=model)
        num_classes = len(classifier.classes)
        with model_errors(
            classifier.settings, (config.batch.microbatch, classifier.num_channels, *2 * [test_image_size])
        ):
            counter = MistakeCounter(test, num_classes, 0, world) if confusion else None
            network, normalise, views = classifier.network, classifier.normalise, views or config.data.test_views
            if sets is None:
                evaluation = partial(evaluate, network, test, normalise, num_classes, mistakes=counter)
            else:
                require_evaluable(test, sets)
                evaluation = partial(evaluate_labels, network, test, sets, normalise)
            result = evaluation(batch_size=config.batch.microbatch, world=world, views=views)
    if confusion and counter:
        write_matrix(confusion, counter, classifier.classes)
    return result, classifier.classes


def write_matrix(path: Path, counter: MistakeCounter, classes: tuple[str, ...]) -> None:
    """Write the confusion matrix as CSV: a row per true class, a column per predicted class."""
    assert counter.matrix is not None, "checked before the evaluation"
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["true class", *classes])
    rows.writerows([name, *counts] for name, counts in zip(classes, counter.matrix.tolist(), strict=True))
    try:
        path.write_text(text.getvalue(), "utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"--confusion {path} cannot be written: {error.strerror}; {remedy(error)}") from None


def own_images(config: RunConfig, folder: Path, card: ModelCard) -> tuple[ImageSet, torch.Tensor | None]:
    """Return the run's test images and their label sets.

    A relative source is searched here and in the folder where the run was started.
    """
    settings = config.data
    start_folder = started_in(folder)
    is_path = settings.source not in NAMED_SOURCES and not Path(settings.source).is_absolute()
    if is_path and not Path(settings.source).exists() and (start_folder / settings.source).exists():
        also = [str(start_folder / path) for path in settings.also]
        settings = msgspec.structs.replace(settings, source=str(start_folder / settings.source), also=also)
    data = load_data_set(settings, config.run.decode_threads or 1)
    if list(data.class_names) != card.classes:
        raise UserError(
            f"{settings.source} has other classes than {folder} was trained on; give the images with --data FOLDER"
        )
    return data.test, data.label_sets


def other_images(config: RunConfig, source: str, card: ModelCard, threads: int) -> tuple[ImageSet, torch.Tensor | None]:
    settings = msgspec.structs.replace(
        config.data, source=expand_home(source), also=[], validation=0.0, center_crop=card.center_crop
    )
    try:
        return load_other_images(settings, card.classes, card.num_channels, threads)
    except UserError as error:  # it names settings of a recipe, which the command does not take
        raise UserError(str(error).replace("data.source=", "--data ").replace(IMAGE_SIZE, "--image-size ")) from None
