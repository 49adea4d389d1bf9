"""The training loop: input, forward and backward, all-reduce, update (Jia et al. 2018, figure 1)."""

import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.data.batches import Stream, TrainingImages
from megabatch.data.images import DataSet
from megabatch.data.normalise import Normalise
from megabatch.data.philox import dropout_seed
from megabatch.optim.optimizers import clip_gradients, set_learning_rate
from megabatch.planning.batch import StepPlan
from megabatch.precision.loss_scale import LossScale
from megabatch.precision.master_weights import MasterWeights
from megabatch.ranks.machine import resident_mb
from megabatch.ranks.world import World
from megabatch.runs.model_card import ModelCard
from megabatch.runs.records import Evaluation, EvaluationRecord, Record, StepRecord
from megabatch.runs.time_breakdown import TimeBreakdown
from megabatch.train.batch_norm import RunningStatistics
from megabatch.train.device import device_mb
from megabatch.train.not_finite import check_loss, check_scale, check_test_loss
from megabatch.train.step_metrics import StepMetrics, StepTotals


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
    stop_requested: Callable[[], bool]
    initial_weights: tuple[str, ...] = ()  # what to say of the weights that the run starts from, if it was given some


@dataclass(frozen=True, kw_only=True)
class Training(Parts):
    """Ready to train: `warm_up` has chosen how gradients are all-reduced."""

    model: DistributedDataParallel
    gradients: GradientAllReduce
    metrics: StepMetrics


class Passed(NamedTuple):
    """What came of the forward and backward passes of a step, beside gradients."""

    totals: StepTotals
    data_wait: TimeBreakdown  # of this rank
    comm_wait_s: float


def train(run: Training, first_step: int = 0) -> Generator[Record, None, None]:
    """Takes the steps of a run from `first_step` on; yields a record after each, and after each evaluation."""
    with run.images.stream(run.world.rank, first_step) as microbatches:
        yield from train_on(microbatches, run, first_step)


def train_on(microbatches: Stream, run: Training, first_step: int) -> Generator[Record, None, None]:
    run.gradients.count_from(first_step)
    for step in range(first_step, run.plan.num_steps):
        started_s, loss_scale = time.perf_counter(), run.loss_scale.value
        totals, data_wait, comm_wait_s = forward_backward(microbatches, run, step)
        overflowed = update(run, totals, step)

        done, epoch = step + 1, run.plan.epochs_after(step + 1)
        evaluated = run.plan.should_evaluate_after(done)
        yield StepRecord(
            step=done,
            epoch=epoch,
            loss=totals.loss,
            lr=run.learning_rate(step),
            loss_scale=loss_scale,
            skipped=overflowed,
            images_per_s=totals.samples / (time.perf_counter() - started_s),
            data_wait_s=data_wait.total,
            data_wait=data_wait,
            skipped_images=totals.skipped,
            comm_wait_s=comm_wait_s,
            straggler=totals.straggler,
            straggler_delay_s=totals.straggler_delay_s,
            evaluated=evaluated,
        )
        if evaluated:
            result = run.evaluate()
            check_test_loss(result.test_loss, step)
            yield EvaluationRecord(
                step=done,
                epoch=epoch,
                resident_mb=resident_mb(),
                device_mb=device_mb(run.world.device),
                **msgspec.structs.asdict(result),
            )
        if totals.stop:
            return


def forward_backward(microbatches: Stream, run: Training, step: int) -> Passed:
    """Leaves the gradients of the global batch, summed over all ranks, in the model."""
    plan = run.plan
    run.master_weights.clear_gradients(accumulates=plan.accumulation > 1)
    for turn, index in enumerate(plan.microbatches_of(run.world.rank)):
        is_last = turn == plan.accumulation - 1
        images, labels = microbatches.next()
        seed_dropout(dropout_seed(run.seed, step, index))
        run.statistics.begin_microbatch(turn)
        with nullcontext() if is_last else run.model.no_sync():
            logits = run.model(run.normalise(images))
            loss = run.summed_loss(logits, labels.to(logits.device)) / plan.global_batch
            run.metrics.add(loss, len(labels))
            if is_last:
                data_wait, skipped = microbatches.take_account()
                run.metrics.send(stop=run.stop_requested(), skipped=skipped)
            run.loss_scale.scaled(loss).backward()  # the last one all-reduces gradients as they appear
    waited_s = time.perf_counter() - run.gradients.ready_s
    totals = run.metrics.receive()
    assert totals.samples == plan.global_batch
    return Passed(totals, data_wait, waited_s + run.metrics.waited_s)


def update(run: Training, totals: StepTotals, step: int) -> bool:
    """Updates the master weights and copies them to the model; True if gradients overflowed, and nothing changed."""
    check_loss(run, totals.loss, step)
    set_learning_rate(run.optimizer, run.learning_rate(step))
    overflowed = apply_gradients(run)
    if overflowed:
        check_scale(run, step)
        run.statistics.undo_step()
    else:
        run.statistics.end_step(totals.statistics)
    run.loss_scale.update(overflowed)
    return overflowed


def apply_gradients(run: Parts) -> bool:
    """The optimizer's part of an update; True if gradients overflowed, and nothing changed."""
    overflowed = run.master_weights.load_gradients(run.loss_scale)  # as fp32, unscaled
    if not overflowed:
        clip_gradients(run.optimizer, run.clip_norm)
        run.optimizer.step()
        run.master_weights.copy_to_model()
    return overflowed


def seed_dropout(seed: int) -> None:
    """What torch.manual_seed does for the generators that we use, in a tenth of its time."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
