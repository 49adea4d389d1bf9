"""The parts of a run on one rank: types that the loop, its checks, checkpoints and preflight share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.data.pipeline.batches import TrainingImages
from megabatch.data.pipeline.images import DataSet
from megabatch.data.pipeline.mix import Mix, Mixing, mix_labels
from megabatch.data.pipeline.normalise import Normalise
from megabatch.planning.batch import StepPlan
from megabatch.precision.loss_scale import LossScale
from megabatch.precision.master_weights import MasterWeights
from megabatch.ranks.world import World
from megabatch.runs.model_card import ModelCard
from megabatch.runs.records import Evaluation
from megabatch.training.batch_norm import RunningStatistics
from megabatch.training.ema import WeightAverage
from megabatch.training.evaluate import MistakeCounter
from megabatch.training.noise import NoiseMeter
from megabatch.training.step_metrics import StepMetrics


def never(*_: object) -> bool:
    return False


class Comparison:
    """The schedule of rank comparisons: every `every` steps, and before weights are saved; 0 disables them."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.same_after = 0  # the steps after which ranks last compared equal

    def is_due(self, done: int) -> bool:
        """Return whether ranks are compared after `done` steps."""
        return self.every > 0 and done % self.every == 0

    def covers(self, done: int) -> bool:
        """Return whether weights after `done` steps may be saved: they were compared, or comparisons are off."""
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
    mixing: Mixing
    network: nn.Module
    update_dtype: torch.dtype  # master weights, the loss and BatchNorm's statistics
    summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    class_weights: list[float] | None  # of `summed_loss`
    label_sets: torch.Tensor | None  # the targets of multi-label images, [sets, classes]
    statistics: RunningStatistics
    master_weights: MasterWeights
    loss_scale: LossScale
    optimizer: torch.optim.Optimizer
    optimizer_name: str  # of a built-in one, or the class of a custom one
    average: WeightAverage
    learning_rate: Callable[[float], float]
    clip_norm: float
    evaluate: Callable[[], Evaluation]
    mistakes: MistakeCounter  # from the last evaluation
    comparison: Comparison
    noise_every: int  # steps between measurements of the gradient noise scale
    stop_requested: Callable[[], bool]
    initial_weights: tuple[str, ...] = ()  # lines about `model.weights`, printed at the start

    def targets(self, labels: torch.Tensor, logits: torch.Tensor, mix: Mix | None) -> torch.Tensor:
        """Return the targets of a microbatch for `summed_loss`: labels [B] or targets [B, classes]."""
        labels = labels.to(logits.device)
        return mix_labels(labels if self.label_sets is None else self.label_sets[labels], logits, mix)


@dataclass(frozen=True, kw_only=True)
class Training(Parts):
    """The parts after `warm_up`, which chose how gradients are all-reduced."""

    model: DistributedDataParallel
    gradients: GradientAllReduce
    metrics: StepMetrics
    noise: NoiseMeter
    # Images, labels and their mixture to `microbatch_result`, with gradients added: for all microbatches of a step but
    # the last.
    graph: Callable[[torch.Tensor, torch.Tensor, Mix | None], torch.Tensor] | None = None

    @property
    def steps_ahead(self) -> int:
        """The number of further steps that are launched before the result of a step is read."""
        return 0 if self.world.device.type == "cpu" or self.statistics.needs_counts else 1
