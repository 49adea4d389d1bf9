"""The training loop: input, forward and backward, all-reduce, update (Jia et al. 2018, figure 1)."""

import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.hook import GradientSums
from megabatch.data.batches import Normalise, Stream, TrainingImages
from megabatch.data.images import DataSet
from megabatch.data.philox import dropout_seed
from megabatch.optim.optimizers import clip_gradients, set_learning_rate
from megabatch.planning.batch import StepPlan
from megabatch.precision.loss_scale import LossScale
from megabatch.precision.masters import Masters
from megabatch.runs.records import EvaluationRecord, Record, StepRecord, find_straggler, resident_mb
from megabatch.train.batch_norm import RunningStatistics
from megabatch.train.evaluate import Evaluation
from megabatch.train.not_finite import check_loss, check_scale, check_test_loss
from megabatch.train.step_metrics import Exchange


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of a run on one rank; `assemble` makes them from a recipe."""

    rank: int
    seed: int
    plan: StepPlan
    data: DataSet
    data_fingerprint: str
    images: TrainingImages
    normalise: Normalise
    model: DistributedDataParallel
    summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    statistics: RunningStatistics
    exchange: Exchange
    gradients: GradientSums
    masters: Masters
    loss_scale: LossScale
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    clip_norm: float
    evaluate: Callable[[], Evaluation]
    stop_requested: Callable[[], bool]


def train(run: Training, first_step: int = 0) -> Generator[Record, None, None]:
    """Takes the steps of a run from `first_step` on; yields a record after each, and after each evaluation."""
    with run.images.stream(run.rank, first_step) as microbatches:
        yield from train_on(microbatches, run, first_step)


def train_on(microbatches: Stream, run: Training, first_step: int) -> Generator[Record, None, None]:
    plan = run.plan
    run.gradients.step = first_step  # for messages
    for step in range(first_step, plan.num_steps):
        started_s = time.perf_counter()
        learning_rate, loss_scale = run.learning_rate(step), run.loss_scale.value
        set_learning_rate(run.optimizer, learning_rate)
        run.masters.clear_gradients(accumulates=plan.accumulation > 1)

        for turn, index in enumerate(plan.microbatches_of(run.rank)):
            is_last = turn == plan.accumulation - 1
            images, labels = microbatches.next()
            seed_dropout(dropout_seed(run.seed, step, index))
            run.statistics.begin_microbatch(turn)
            with nullcontext() if is_last else run.model.no_sync():
                logits = run.model(run.normalise(images))
                loss = run.summed_loss(logits, labels.to(logits.device)) / plan.global_batch
                run.exchange.add(loss, len(labels))
                if is_last:
                    waited, skipped = microbatches.take_account()
                    run.exchange.send(stop=run.stop_requested(), skipped=skipped)
                run.loss_scale.scaled(loss).backward()  # the last one sums gradients over ranks as they appear

        comm_wait_s = time.perf_counter() - run.gradients.ready_s
        totals = run.exchange.receive()
        check_loss(run, totals.loss, step)
        overflowed = run.masters.load_gradients(run.loss_scale)  # as fp32, unscaled
        if overflowed:
            check_scale(run, step)
            run.statistics.undo_step()
        else:
            clip_gradients(run.optimizer, run.clip_norm)
            run.optimizer.step()
            run.masters.publish()
            run.statistics.end_step(totals.statistics)
        run.loss_scale.see(overflowed)

        done = step + 1
        epoch = plan.epochs_after(done)
        assert totals.samples == plan.global_batch
        straggler, straggler_delay_s = find_straggler(totals.waited_s)
        yield StepRecord(
            step=done,
            epoch=epoch,
            loss=totals.loss,
            lr=learning_rate,
            loss_scale=loss_scale,
            skipped=overflowed,
            images_per_s=plan.global_batch / (time.perf_counter() - started_s),
            data_wait_s=waited.total,
            data_wait=waited,
            skipped_images=totals.skipped,
            comm_wait_s=comm_wait_s + run.exchange.waited_s,
            straggler=straggler,
            straggler_delay_s=straggler_delay_s,
        )
        if plan.should_evaluate_after(done):
            evaluation = run.evaluate()
            check_test_loss(evaluation.test_loss, step)
            yield EvaluationRecord(
                step=done, epoch=epoch, resident_mb=resident_mb(), **msgspec.structs.asdict(evaluation)
            )
        if totals.stop:
            return


def seed_dropout(seed: int) -> None:
    """What torch.manual_seed does for the generators that we use, in a tenth of its time."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
