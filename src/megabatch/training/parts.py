"""The parts of a run on one rank: the types that the loop, its checks, checkpoints and preflight share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.data.pipeline.batches import TrainingImages
from megabatch.data.pipeline.images import DataSet
from megabatch.data.pipeline.normalise import Normalise
from megabatch.planning.batch import StepPlan
from megabatch.precision.loss_scale import LossScale
from megabatch.precision.master_weights import MasterWeights
from megabatch.ranks.world import World
from megabatch.runs.model_card import ModelCard
from megabatch.runs.records import Evaluation
from megabatch.training.batch_norm import RunningStatistics
from megabatch.training.evaluate import MistakeCounter
from megabatch.training.step_metrics import StepMetrics


class Comparison:
    """Of ranks, every so many steps, and wherever their weights may be saved; 0: never."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.same_after = 0  # so many steps

    def is_due(self, done: int) -> bool:
        """After so many steps."""
        return self.every > 0 and done % self.every == 0

    def covers(self, done: int) -> bool:
        """Whether weights after so many steps may be saved: they were compared, or never are."""
        return not self.every or self.same_after == done


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run on one rank; `assemble` makes them from a recipe."""

    world: World
    seed: int
    plan: StepPlan
    data: DataSet
    data_fingerprint: str
    card: ModelCard
    images: TrainingImages
    normalise: Normalise
    network: nn.Module
    update_dtype: torch.dtype  # of master weights, the loss and BatchNorm's statistics
    summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    statistics: RunningStatistics
    master_weights: MasterWeights
    loss_scale: LossScale
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    clip_norm: float
    evaluate: Callable[[], Evaluation]
    mistakes: MistakeCounter  # of the newest evaluation
    comparison: Comparison
    stop_requested: Callable[[], bool]
    initial_weights: tuple[str, ...] = ()  # what to say of the weights that the run starts from, if it was given some


@dataclass(frozen=True, kw_only=True)
class Training(Parts):
    """Ready to train: `warm_up` has chosen how gradients are all-reduced."""

    model: DistributedDataParallel
    gradients: GradientAllReduce
    metrics: StepMetrics

    @property
    def steps_ahead(self) -> int:
        """How many steps are begun before the result of one is read."""
        return 0 if self.world.device.type == "cpu" or self.statistics.needs_counts else 1
