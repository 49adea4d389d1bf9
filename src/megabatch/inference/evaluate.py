"""Evaluates a run again, from the weights that it left and what belongs to them."""

from pathlib import Path

import msgspec
import torch

from megabatch.config.loading import load_config, silent
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import FROM_PYTHON, NAMED_SOURCES, load_data_set, load_other_images
from megabatch.data.pipeline.images import ImageSet
from megabatch.errors import UserError
from megabatch.inference.classifier import make_classifier
from megabatch.models.catalog import model_errors
from megabatch.precision.policy import PrecisionSettings
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.world import choose_device, connect
from megabatch.runs.files import CONFIG
from megabatch.runs.model_card import ModelCard
from megabatch.runs.reader import is_run, started_in
from megabatch.runs.records import Evaluation
from megabatch.training.checkpoint.weights import find_weights
from megabatch.training.evaluate import evaluate
from megabatch.training.numerics import arithmetic, fix_workspace


def evaluate_run(
    folder: Path, source: str | None, checkpoint: str | None = None, model: str | None = None
) -> tuple[Evaluation, tuple[str, ...]]:
    """The run's own test images, or those of another source, prepared as in training; and the names of the classes.

    With the run's own threads and batches the logits are the same to the bit, and so are all figures.
    """
    if not is_run(folder):
        raise UserError(f"{folder} is not a run's folder; `megabatch runs` lists runs")
    config = load_config(str(folder / CONFIG), report=silent)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{folder} was trained from Python, where its model and images are; evaluate it there")
    weights = find_weights(folder, checkpoint)
    threads = config.run.decode_threads or 1
    test = other_images(config, source, weights.card, threads) if source else own_images(config, folder, weights.card)
    torch.set_num_threads(config.run.threads or 1)
    device = choose_device(config.run.device)
    fix_workspace(config.run.deterministic, device)
    with (
        connect(RankInfo(0, 1, 0, 1), device) as world,
        arithmetic(PrecisionSettings(name=weights.card.precision), config.run.deterministic),
    ):
        classifier = make_classifier(weights, world.device, named=model)
        num_classes = len(classifier.classes)
        with model_errors(classifier.settings):
            result = evaluate(
                classifier.network, test, classifier.normalise, num_classes, config.batch.microbatch, world
            )
    return result, classifier.classes


def own_images(config: RunConfig, folder: Path, card: ModelCard) -> ImageSet:
    """Wherever the command is run: a relative source is looked for here, and where the run was started."""
    settings = config.data
    began_in = started_in(folder)
    is_path = settings.source not in NAMED_SOURCES and not Path(settings.source).is_absolute()
    if is_path and not Path(settings.source).exists() and (began_in / settings.source).exists():
        also = [str(began_in / path) for path in settings.also]
        settings = msgspec.structs.replace(settings, source=str(began_in / settings.source), also=also)
    data = load_data_set(settings, config.run.decode_threads or 1)
    if list(data.class_names) != card.classes:
        raise UserError(
            f"{settings.source} has other classes than {folder} was trained on; give the images with --data FOLDER"
        )
    return data.test


def other_images(config: RunConfig, source: str, card: ModelCard, threads: int) -> ImageSet:
    settings = msgspec.structs.replace(
        config.data, source=source, also=[], validation=0.0, image_size=card.image_size, center_crop=card.center_crop
    )
    return load_other_images(settings, card.classes, card.num_channels, threads)
