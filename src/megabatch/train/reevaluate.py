"""Evaluates a run again from the weights that it left."""

from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import make_model
from megabatch.data.normalise import Normalise, measure_pixels
from megabatch.data.sources import FROM_PYTHON, load_data_set, load_other_images
from megabatch.errors import UserError
from megabatch.precision.place import place_model
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.world import choose_device, connect
from megabatch.runs.files import CONFIG, WEIGHTS
from megabatch.runs.reader import is_run
from megabatch.runs.records import Evaluation
from megabatch.train.checkpoint import model_state, newest_good, read_state
from megabatch.train.evaluate import evaluate


def evaluate_run(folder: Path, source: str | None) -> tuple[Evaluation, tuple[str, ...]]:
    """The run's own test images, or those of another source, normalised as in training; and the names of the classes.

    With the run's own threads and batches the logits are the same to the bit, and so are all figures.
    """
    if not is_run(folder):
        raise UserError(f"{folder} is not a run's folder; `megabatch runs` lists runs")
    config = load_config(str(folder / CONFIG), report=silent)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{folder} was trained from Python, where its model and images are; evaluate it there")
    threads = config.run.decode_threads or 1
    trained_on = load_data_set(config.data, threads)
    test = trained_on.test
    if source is not None:
        settings = msgspec.structs.replace(config.data, source=source, also=[], validation=0.0)
        test = load_other_images(settings, trained_on, threads)
    torch.set_num_threads(config.run.threads or 1)
    with connect(RankInfo(0, 1, 0, 1), choose_device(config.run.device)) as world:
        model = make_model(config, trained_on.shape).to(config.precision.formats.update)  # fp64 would be rounded
        model.load_state_dict(read_weights(folder))
        place_model(model, config.precision, world.device, config.model.wants_channels_last)
        formats = config.precision.formats
        normalise = Normalise(
            measure_pixels(trained_on.train), world.device, formats.model, config.model.wants_channels_last
        )
        num_classes = len(trained_on.class_names)
        result = evaluate(model, test, normalise, num_classes, config.batch.microbatch, world)
    return result, trained_on.class_names


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights, or those of the newest checkpoint of a run that is not finished."""
    weights = folder / WEIGHTS
    if weights.exists():
        return load_file(weights)
    checkpoint = newest_good(folder, report=lambda damage: None)
    if checkpoint is None:
        raise UserError(f"{folder} has neither model.safetensors nor a whole checkpoint; train it first")
    return model_state(read_state(checkpoint))
