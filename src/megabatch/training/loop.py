"""The training loop: input, forward and backward, all-reduce, update (Jia et al. 2018, figure 1).

`begin_step` launches one step and `end_step` reads its result.  On an accelerator the next step is launched in between,
so that the device always has work; on a CPU the result is read at once.  Decisions within a step that depend on its
result (did gradients overflow, is the loss finite) are made on the device.
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
from megabatch.optim.optimizers import clip_gradients, follow_schedule, has_bad_gradient, step_unless
from megabatch.ranks.machine import resident_mb
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, GpuUse, Record, StepRecord, TimeBreakdown
from megabatch.telemetry.activity import BACKWARD
from megabatch.telemetry.timeline import STEPS
from megabatch.training.device import device_mb, gpu_uuid, seed_dropout
from megabatch.training.drift import compare_ranks
from megabatch.training.gpu_use import GpuSampler
from megabatch.training.not_finite import check_gradients, check_loss, check_scale, check_test_loss
from megabatch.training.parts import Parts, Training, never
from megabatch.training.step_metrics import Numbers, StepTotals, microbatch_result, step_times


class PendingStep(NamedTuple):
    """A step that was launched, and that the device may not have finished."""

    step: int
    began_s: float
    numbers: Numbers  # being copied to the host
    losses: torch.Tensor  # of this rank's microbatches
    data_wait: TimeBreakdown  # on this rank
    skipped_images: list[str]  # on this rank


def train(
    run: Training,
    first_step: int = 0,
    is_due: Callable[[int], bool] = never,
    is_over: Callable[[], bool] = never,
) -> Generator[Record, None, None]:
    """Train from `first_step` on, and yield a record after each step and each evaluation.

    The run ends early if `is_over` is true, on all ranks, at its start or after an evaluation's record was yielded.

    If an evaluation follows a step, or `is_due(steps done)` is true on some rank because it saves the weights, no rank
    launches a further step before the record is yielded.
    """
    run.world.activity.record(run.gradients.timeline, run.world.device)
    with (
        run.images.stream(run.world.rank, first_step) as microbatches,
        GpuSampler(gpu_uuid(run.world.device)) as gpu,
    ):
        yield from train_on(microbatches, run, first_step, is_due, gpu, is_over)
    run.world.activity.end_steps()


def train_on(
    microbatches: Stream,
    run: Training,
    first_step: int,
    is_due: Callable[[int], bool] = never,
    gpu: GpuSampler | None = None,
    is_over: Callable[[], bool] = never,
) -> Generator[Record, None, None]:
    run.gradients.count_from(first_step)
    run.comparison.same_after = first_step
    pending: deque[PendingStep] = deque()
    stop, saved, ended_s = False, 0, 0.0  # saved: the step whose weights some rank saves
    for step in range(first_step, first_step if is_over() else run.plan.num_steps):
        pending.append(begin_step(microbatches, run, step, is_due))
        done = step + 1
        evaluated = run.plan.should_evaluate_after(done)
        # All ranks must wait at the same steps: a rank that starts a collective while the others have launched one more
        # step waits forever.  The first step always waits, since no earlier step could announce that it is due.
        is_awaited = evaluated or run.comparison.is_due(done) or done in (first_step + 1, saved, run.plan.num_steps)
        while len(pending) > (0 if is_awaited else run.steps_ahead):
            record, totals = end_step(run, pending.popleft(), ended_s)
            ended_s, stop = time.perf_counter(), stop or totals.stop
            saved = record.step + run.steps_ahead if totals.save else saved
            is_awaited = is_awaited or stop or saved == done
            if is_awaited and not pending:  # before a rank saves the weights
                compare_ranks(run, done)
            run.world.activity.begin_steps()
            run.gradients.timeline.leave(STEPS)
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
                wall_s=0.0,  # set by `train_and_record`
                times=step_times(run.world.activity.take()),
                rank_waits_s=run.metrics.take_waits(),
                rank_gpus=gather_gpus(run.world, gpu),
                **msgspec.structs.asdict(result),
            )
        if (stop or (evaluated and is_over())) and not pending:
            return


def gather_gpus(world: World, gpu: GpuSampler | None) -> list[GpuUse | None]:
    """Return the use of every rank's GPU.  All ranks call it; a rank without NVML sends None."""
    if gpu is None or world.device.type == "cpu":
        return []
    return world.all_gather(gpu.take(), GpuUse | None)


def begin_step(microbatches: Stream, run: Training, step: int, is_due: Callable[[int], bool] = never) -> PendingStep:
    """Launch input, forward and backward, all-reduce and update."""
    began_s, activity = time.perf_counter(), run.world.activity
    activity.begin_step(step + 1)
    # The other ranks read this flag with the step's result.  By then they have launched `steps_ahead` further steps.
    save = is_due(step + 1 + run.steps_ahead)
    data_wait, skipped_images = forward_backward(microbatches, run, step, save)
    run.metrics.receive()
    activity.begin("update")
    overflowed, squares = update(run, step)
    numbers = run.metrics.to_host(overflowed, squares)
    return PendingStep(step, began_s, numbers, run.metrics.sent_losses, data_wait, skipped_images)


def forward_backward(
    microbatches: Stream, run: Training, step: int, save: bool = False
) -> tuple[TimeBreakdown, list[str]]:
    """Compute the gradients of the global batch, all-reduced over the ranks, in the model's parameters."""
    plan, activity = run.plan, run.world.activity
    run.master_weights.clear_gradients(accumulates=plan.accumulation > 1)
    for turn, index in enumerate(plan.microbatches_of(run.world.rank)):
        is_last = turn == plan.accumulation - 1
        activity.begin("data")
        images, labels = microbatches.next()
        activity.begin("forward")
        mix = run.mixing(step, index, *images.shape[2:])
        seed_dropout(dropout_seed(run.seed, step, index), run.world.device)
        run.statistics.begin_microbatch(turn)
        if run.graph and not is_last and not run.noise.is_measured(step):  # a graph calls no hooks
            run.metrics.add(run.graph(images, labels, mix), len(labels))
            continue
        with nullcontext() if is_last else run.model.no_sync():
            logits = run.model(run.normalise(images, mix))
            targets = run.targets(labels, logits, mix)
            loss = run.summed_loss(logits, targets) / plan.global_batch
            run.metrics.add(microbatch_result(loss, logits, targets), len(labels))
            if is_last:
                data_wait, skipped = microbatches.take_waits()
                run.metrics.send(stop=run.stop_requested(), save=save, num_skipped=len(skipped))
            activity.begin(BACKWARD)
            with run.noise.observe(step):
                run.loss_scale.scaled(loss).backward()  # the last backward all-reduces gradients as they become ready
    return data_wait, skipped


def update(run: Training, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the master weights and copy them to the model.

    Return 1 if gradients overflowed, else 0, and the squared norms of gradients before they are clipped.

    The update is skipped if gradients overflowed.  It is also skipped in every step after a loss or gradient that is
    inf or NaN for another reason than the loss scale.
    """
    follow_schedule(run.optimizer, run.learning_rate, step, run.plan.num_steps)
    overflowed = run.master_weights.load_gradients(run.loss_scale)  # as fp32, unscaled
    squares = run.noise.squares(step, run.optimizer)
    run.metrics.note_gradients(clip_and_check(run, run.gradients.take_finite))
    skipped = torch.maximum(overflowed, run.metrics.has_failed)
    apply_gradients(run, skipped)
    run.statistics.end_step(run.metrics.statistics, skipped)
    run.average.update(step + 1)
    run.loss_scale.update(overflowed)
    return overflowed, squares


def clip_and_check(run: Parts, are_finite: Callable[[], bool] = never) -> torch.Tensor | None:
    """Clip gradients.  Return 1 if one is inf or NaN, else 0; None if an earlier check found all of them finite."""
    norm = clip_gradients(run.optimizer, run.clip_norm)
    if norm is None and isinstance(run.optimizer, LARS):
        norm = run.optimizer.gradient_norm()  # LARS needs it anyway
    if run.loss_scale.is_on or (norm is None and are_finite()):
        return None
    return has_bad_gradient(run.optimizer, norm)


def apply_gradients(run: Parts, skipped: torch.Tensor) -> None:
    """Run the optimizer unless `skipped` is 1, and copy the master weights to the model."""
    step_unless(run.optimizer, skipped)
    run.master_weights.copy_to_model()


def end_step(run: Training, pending: PendingStep, previous_ended_s: float) -> tuple[StepRecord, StepTotals]:
    """Read the result of a step.  Return its record and totals."""
    run.world.activity.begin("the device's results")
    totals, step = run.metrics.read(pending.numbers, pending.skipped_images), pending.step
    run.gradients.raise_error()  # the result of an aborted all-reduce is undefined
    assert totals.samples == run.plan.global_batch
    check_loss(run, totals.loss, step, pending.losses)
    if totals.has_failed:
        check_gradients(run, step)
    if totals.overflowed:
        check_scale(run, step)
    loss_scale = run.loss_scale.value
    run.loss_scale.record(totals.overflowed)
    # A step that was launched during the previous one is timed from the end of that.
    taken_s = time.perf_counter() - max(pending.began_s, previous_ended_s)
    times = step_times(run.world.activity.take())
    record = StepRecord(
        step=step + 1,
        epoch=run.plan.epochs_after(step + 1),
        loss=totals.loss,
        top1=totals.top1,
        lr=run.learning_rate(step),
        loss_scale=loss_scale,
        skipped=totals.overflowed,
        image_size=run.images.side(step),
        images_per_s=totals.samples / taken_s,
        data_wait_s=pending.data_wait.total,
        data_wait=pending.data_wait,
        skipped_images=totals.skipped,
        comm_wait_s=times.comm,
        straggler=totals.straggler,
        straggler_delay_s=totals.straggler_delay_s,
        evaluated=run.plan.should_evaluate_after(step + 1),
        noise=run.noise.record(step, totals.squares),
        wall_s=0.0,  # set by `train_and_record`
        times=times,
    )
    return record, totals
