"""The training loop: input, forward and backward, all-reduce, update (Jia et al. 2018, figure 1).

A step is begun (`begin_step`) and its result read (`end_step`).  On an accelerator the next step is begun in between,
so that the device always has work and the host never waits for what it has just handed over; a CPU reads at once.  What
depends on the result within the step, whether gradients overflowed or the loss is a number, is decided on the device.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import NamedTuple

import msgspec
import torch

from megabatch.data.pipeline.batches import Stream
from megabatch.data.pipeline.order import dropout_seed
from megabatch.optim.lars import LARS
from megabatch.optim.optimizers import clip_gradients, has_bad_gradient, set_learning_rate, step_unless
from megabatch.ranks.machine import resident_mb
from megabatch.runs.records import EvaluationRecord, Record, StepRecord, TimeBreakdown
from megabatch.telemetry.activity import ALL_REDUCE, BACKWARD
from megabatch.training.device import device_mb, seed_dropout
from megabatch.training.drift import compare_ranks
from megabatch.training.not_finite import check_gradients, check_loss, check_scale, check_test_loss
from megabatch.training.parts import Parts, Training
from megabatch.training.step_metrics import Numbers, StepTotals, activity_times, step_times


class BegunStep(NamedTuple):
    """What the host knows of a step that the device may not have finished."""

    step: int
    began_s: float
    numbers: Numbers  # on their way to the host
    losses: torch.Tensor  # of this rank's microbatches
    data_wait: TimeBreakdown  # of this rank
    skipped_images: list[str]  # by this rank
    comm_wait_s: float  # by the host's clock


def never(step: int) -> bool:
    return False


def not_known() -> bool:
    return False


def train(run: Training, first_step: int = 0, is_due: Callable[[int], bool] = never) -> Generator[Record, None, None]:
    """Takes the steps of a run from `first_step` on; yields a record after each, and after each evaluation.

    Where an evaluation follows, or `is_due` of the steps taken says on some rank that somebody wants the weights, no
    rank begins a further step before the record.
    """
    run.world.activity.times = activity_times(run.world.device, run.gradients.device_clock)
    with run.images.stream(run.world.rank, first_step) as microbatches:
        yield from train_on(microbatches, run, first_step, is_due)
    run.world.activity.end_steps()


def train_on(
    microbatches: Stream, run: Training, first_step: int, is_due: Callable[[int], bool] = never
) -> Generator[Record, None, None]:
    run.gradients.count_from(first_step)
    run.comparison.same_after = first_step
    begun: deque[BegunStep] = deque()
    stop, saved, ended_s = False, 0, 0.0  # saved: the step whose weights some rank wants
    for step in range(first_step, run.plan.num_steps):
        begun.append(begin_step(microbatches, run, step, is_due))
        done = step + 1
        evaluated = run.plan.should_evaluate_after(done)
        # All ranks wait for the same steps: one that asks others for something, while they have begun a step that it
        # has not, waits for ever.  Of the first, nobody could say before whether it is due.
        is_awaited = evaluated or run.comparison.is_due(done) or done in (first_step + 1, saved, run.plan.num_steps)
        while len(begun) > (0 if is_awaited else run.steps_ahead):
            record, totals = end_step(run, begun.popleft(), ended_s)
            ended_s, stop = time.perf_counter(), stop or totals.stop
            saved = record.step + run.steps_ahead if totals.save else saved
            is_awaited = is_awaited or stop or saved == done
            if is_awaited and not begun:  # before anybody saves the weights
                compare_ranks(run, done)
            run.world.activity.begin_steps()
            run.world.activity.begin("records")
            yield record
        if evaluated:
            result = run.evaluate()
            check_test_loss(result.test_loss, step)
            run.world.activity.begin("records")
            yield EvaluationRecord(
                step=done,
                epoch=record.epoch,
                resident_mb=resident_mb(),
                device_mb=device_mb(run.world.device),
                wall_s=0.0,  # set by the run, which knows when it began
                times=step_times(run.world.activity.times.take()),
                rank_waits_s=run.metrics.take_waits(),
                **msgspec.structs.asdict(result),
            )
        if stop and not begun:
            return


def begin_step(microbatches: Stream, run: Training, step: int, is_due: Callable[[int], bool] = never) -> BegunStep:
    """Input, forward and backward, all-reduce, update."""
    began_s, activity = time.perf_counter(), run.world.activity
    activity.step = step + 1
    # Others hear of it when they read this step: by then they have begun as many as are begun ahead.
    save = is_due(step + 1 + run.steps_ahead)
    data_wait, skipped_images = forward_backward(microbatches, run, step, save)
    activity.begin(ALL_REDUCE, waits=True)
    run.metrics.receive()
    waited_s = time.perf_counter() - run.gradients.ready_s
    activity.begin("update")
    overflowed = update(run, step)
    numbers = run.metrics.to_host(overflowed)
    return BegunStep(step, began_s, numbers, run.metrics.sent_losses, data_wait, skipped_images, waited_s)


def forward_backward(
    microbatches: Stream, run: Training, step: int, save: bool = False
) -> tuple[TimeBreakdown, list[str]]:
    """Leaves the gradients of the global batch, summed over all ranks, in the model."""
    plan, activity = run.plan, run.world.activity
    run.master_weights.clear_gradients(accumulates=plan.accumulation > 1)
    for turn, index in enumerate(plan.microbatches_of(run.world.rank)):
        is_last = turn == plan.accumulation - 1
        activity.begin("data")
        images, labels = microbatches.next()
        activity.begin("forward")
        seed_dropout(dropout_seed(run.seed, step, index), run.world.device)
        run.statistics.begin_microbatch(turn)
        with nullcontext() if is_last else run.model.no_sync():
            logits = run.model(run.normalise(images))
            loss = run.summed_loss(logits, labels.to(logits.device)) / plan.global_batch
            run.metrics.add(loss, len(labels))
            if is_last:
                data_wait, skipped = microbatches.take_account()
                run.metrics.send(stop=run.stop_requested(), save=save, num_skipped=len(skipped))
            activity.begin(BACKWARD)
            run.loss_scale.scaled(loss).backward()  # the last one all-reduces gradients as they appear
    return data_wait, skipped


def update(run: Training, step: int) -> torch.Tensor:
    """Updates the master weights and copies them to the model; 1 if gradients overflowed, and nothing changed, else 0.

    Nothing changes either from the first step on whose loss or gradients are inf or NaN, where no loss scale helps.
    """
    set_learning_rate(run.optimizer, run.learning_rate(step))
    overflowed = run.master_weights.load_gradients(run.loss_scale)  # as fp32, unscaled
    run.metrics.note_gradients(clip_and_check(run, run.gradients.take_finite))
    skipped = torch.maximum(overflowed, run.metrics.has_failed)
    apply_gradients(run, skipped)
    run.statistics.end_step(run.metrics.statistics, skipped)
    run.loss_scale.follow(overflowed)
    return overflowed


def clip_and_check(run: Parts, are_finite: Callable[[], bool] = not_known) -> torch.Tensor | None:
    """1 if a gradient is inf or NaN, else 0; None where none is: somebody has looked for them already."""
    norm = clip_gradients(run.optimizer, run.clip_norm)
    if norm is None and isinstance(run.optimizer, LARS):
        norm = run.optimizer.gradient_norm()  # which it needs anyway
    if run.loss_scale.is_on or (norm is None and are_finite()):
        return None
    return has_bad_gradient(run.optimizer, norm)


def apply_gradients(run: Parts, skipped: torch.Tensor) -> None:
    """The optimizer's part of an update."""
    step_unless(run.optimizer, skipped)
    run.master_weights.copy_to_model()


def end_step(run: Training, begun: BegunStep, previous_ended_s: float) -> tuple[StepRecord, StepTotals]:
    """Reads the result of a step: the record, and what it was made from."""
    run.world.activity.begin("the device's results")
    totals, step = run.metrics.read(begun.numbers, begun.skipped_images), begun.step
    run.gradients.raise_error()  # an all-reduce that was aborted leaves anything
    assert totals.samples == run.plan.global_batch
    check_loss(run, totals.loss, step, begun.losses)
    if totals.has_failed:
        check_gradients(run, step)
    if totals.overflowed:
        check_scale(run, step)
    loss_scale = run.loss_scale.value
    run.loss_scale.note(totals.overflowed)
    # A step that was begun while the one before was under way has taken the time since that ended.
    taken_s = time.perf_counter() - max(begun.began_s, previous_ended_s)
    exposed_s = run.gradients.exposed_wait_s  # on an accelerator, whose time the host's clock does not show
    comm_wait_s = begun.comm_wait_s if exposed_s is None else exposed_s
    record = StepRecord(
        step=step + 1,
        epoch=run.plan.epochs_after(step + 1),
        loss=totals.loss,
        lr=run.learning_rate(step),
        loss_scale=loss_scale,
        skipped=totals.overflowed,
        images_per_s=totals.samples / taken_s,
        data_wait_s=begun.data_wait.total,
        data_wait=begun.data_wait,
        skipped_images=totals.skipped,
        comm_wait_s=comm_wait_s,
        straggler=totals.straggler,
        straggler_delay_s=totals.straggler_delay_s,
        evaluated=run.plan.should_evaluate_after(step + 1),
        wall_s=0.0,  # set by the run, which knows when it began
        times=step_times(run.world.activity.times.take(), comm_wait_s),
    )
    return record, totals
