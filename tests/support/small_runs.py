"""Small runs on real ranks, with results that tests can compare."""

from typing import Any

import numpy as np

from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.training.loop import train
from megabatch.training.parts import Training
from megabatch.training.prepare import ready_to_train

# 50 steps of eight microbatches of four; 8 evaluations of 37 images; dropout, crops, flips, decay and warm-up.
SMALL_RUN = [
    "model.name=small_cnn",
    "model.options.width=4",
    "model.options.dropout=0.2",
    "data.source=synthetic",
    "data.image_size=12",
    "data.synthetic.train=200",
    "data.synthetic.test=37",
    "data.synthetic.classes=6",
    "batch.global=32",
    "batch.micro=4",
    "optim.learning_rate=0.05",
    "train.epochs=8",
    "precision.name=fp64",
    "run.threads=1",
]


def small_run(*overrides: str) -> RunConfig:
    return load_config("fashion", [*SMALL_RUN, *overrides])


def begin_small(world: World, *overrides: str) -> Training:
    config = small_run(*overrides)
    return ready_to_train(config, load_data_set(config.data), world)


def train_small(world: World, *overrides: str) -> dict[str, Any]:
    """Train `small_run`; return losses and top-1 of its steps, its evaluations and the final state in float64."""
    training = begin_small(world, *overrides)
    losses, top1s, evaluations, norms = [], [], [], []
    for record in train(training):
        if isinstance(record, StepRecord):
            losses.append(record.loss)
            top1s.append(record.top1)
            norms.append(np.concatenate([tensor.cpu().numpy() for tensor in training.statistics.tensors]))
        elif isinstance(record, EvaluationRecord):
            evaluations.append(record)
    state = {key: value.cpu().numpy() for key, value in training.model.module.state_dict().items()}
    state |= {f"average.{name}": average.cpu().numpy() for name, average in training.average.tensors.items()}
    return {"losses": losses, "top1s": top1s, "evaluations": evaluations, "norms": norms, "state": state}
