"""The variance of a layer's output in every checkpoint of a run, on the same training images.

Jia et al. 2018 saw the variance of AlexNet's pool5 grow with the iterations and added a BatchNorm after it.  The
network is in training mode, so that a BatchNorm takes its statistics from a microbatch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import make_model, plan_run
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.experiments.evidence import Curve
from megabatch.runs.files import CHECKPOINTS, CONFIG
from megabatch.training.checkpoint.format import newest_first, read_state, step_of
from megabatch.training.checkpoint.state import model_state

NUM_IMAGES = 512


def of_pool5(folder: Path) -> Curve:
    """Return the curve of pool5, for `[curves]` in the file of a study."""
    return layer_variance(folder, "pool5")


@torch.no_grad()
def layer_variance(folder: Path, layer: str) -> Curve:
    """Return (epoch, variance) for each checkpoint of a run."""
    config = load_config(str(folder / CONFIG), report=silent)
    data = load_data_set(config.data)
    model = make_model(config, data.shape).train()
    plan = plan_run(config, data.shape, num_ranks=1)
    images = data.train.read(np.linspace(0, len(data.train) - 1, NUM_IMAGES).astype(np.int64))
    pixels = Normalise(measure_pixels(data.train), torch.device("cpu"), torch.float32)(images)
    microbatches = pixels.split(config.batch.microbatch)
    curve: Curve = []
    for path in reversed(newest_first(folder / CHECKPOINTS)):
        model.load_state_dict(model_state(read_state(path)))
        curve.append((plan.epochs_after(step_of(path)), variance_of(model, layer, microbatches)))
    return curve


def variance_of(model: nn.Module, layer: str, microbatches: Sequence[torch.Tensor]) -> float:
    outputs: list[torch.Tensor] = []
    with model.get_submodule(layer).register_forward_hook(lambda module, given, output: outputs.append(output)):
        for images in microbatches:
            model(images)
    return torch.cat(outputs).var().item()
