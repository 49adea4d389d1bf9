"""What a run leaves behind: a record per step and per evaluation, and a summary of them."""

import os
import statistics
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from megabatch.runs.time_breakdown import Stages
from megabatch.train.evaluate import Evaluation

Status = Literal["finished", "stopped", "diverged", "failed"]


class StepRecord(Struct, frozen=True, kw_only=True):
    step: int  # optimizer steps taken, from 1
    epoch: float  # passes over the training set
    loss: float  # mean over the global batch, before the update
    lr: float
    loss_scale: float  # 1 where there is none
    skipped: bool  # gradients overflowed: weights, optimizer and statistics were left as they are
    images_per_s: float
    data_wait_s: float  # rank 0 waited for images
    data_wait: Stages = field(default_factory=Stages)  # the same, by what was being done to them
    skipped_images: list[str] = field(default_factory=list)  # not readable, and why; another stood in for each
    comm_wait_s: float  # rank 0 waited for other ranks, after all its gradients were ready
    straggler: int  # the rank that has waited least for others so far, since they waited for it
    straggler_delay_s: float  # by how much less than the others in the middle, a step


class EvaluationRecord(Evaluation, frozen=True, kw_only=True):
    step: int
    epoch: float
    resident_mb: float | None = None  # memory of rank 0's process


Record = StepRecord | EvaluationRecord


class Straggler(Struct, frozen=True):
    rank: int
    delay_s: float  # a step, for which the others waited
    share: float  # of the time of training steps


class Summary(Struct, frozen=True, kw_only=True):
    status: Status
    top1: float | None
    top5: float | None
    best_top1: float | None
    test_loss: float | None
    class_top1: list[float | None] | None
    samples_evaluated: int
    steps: int
    skipped_steps: int  # of them, since their gradients overflowed
    loss_scale: float | None  # the last
    resumed_from_step: int | None  # where the last resumption began
    wall_s: float  # of training, evaluations included; what a resumption repeats is counted once
    images_per_s: float | None  # over all training steps, evaluations left out
    data_wait_share: float | None  # of the time of training steps
    data_wait: Stages | None  # the same, by what was being done to the images
    skipped_images: int  # that could not be read, in all epochs, and for which others stood in
    comm_wait_share: float | None
    straggler: Straggler | None  # the rank that delayed the others most, since the last resumption; None on one rank
    resident_mb: float | None  # memory of rank 0's process at the last evaluation
    time_to_target_s: float | None  # wall time of the first evaluation that reached train.target_top1


class Tally(Struct, kw_only=True):
    """Adds records up to a summary.  It goes into checkpoints, so that a resumed run adds on."""

    global_batch: int
    target_top1: float | None
    steps: int = 0
    epoch: float = 0.0
    skipped_steps: int = 0
    loss_scale: float | None = None
    wall_s: float = 0.0
    training_s: float = 0.0
    data_wait: Stages = field(default_factory=Stages)
    skipped_images: int = 0
    epoch_skipped: int = 0  # of them, since the epoch began
    comm_wait_s: float = 0.0
    straggler: Straggler | None = None
    evaluation: EvaluationRecord | None = None
    best_top1: float | None = None
    best_step: int | None = None
    time_to_target_s: float | None = None
    resumed_from_step: int | None = None

    def add(self, record: Record, wall_s: float) -> None:
        self.wall_s = wall_s
        if isinstance(record, StepRecord):
            self.steps = record.step
            self.skipped_steps += record.skipped
            self.loss_scale = record.loss_scale
            self.training_s += self.global_batch / record.images_per_s
            self.data_wait.add(record.data_wait)
            self.skipped_images += len(record.skipped_images)
            if int(record.epoch) > int(self.epoch):
                self.epoch_skipped = 0
            self.epoch = record.epoch
            self.epoch_skipped += len(record.skipped_images)
            self.comm_wait_s += record.comm_wait_s
            if record.straggler_delay_s:
                share = record.straggler_delay_s * self.steps / self.training_s
                self.straggler = Straggler(record.straggler, record.straggler_delay_s, share)
            return
        self.evaluation = record
        if self.best_top1 is None or record.top1 > self.best_top1:
            self.best_top1, self.best_step = record.top1, record.step
        reached = self.target_top1 is not None and record.top1 >= self.target_top1
        if reached and self.time_to_target_s is None:
            self.time_to_target_s = wall_s

    def summary(self, status: Status) -> Summary:
        last = self.evaluation
        waited = self.data_wait.scaled(1 / self.training_s) if self.steps else None
        return Summary(
            status=status,
            top1=last.top1 if last else None,
            top5=last.top5 if last else None,
            best_top1=self.best_top1,
            test_loss=last.test_loss if last else None,
            class_top1=last.class_top1 if last else None,
            samples_evaluated=last.samples_evaluated if last else 0,
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            loss_scale=self.loss_scale,
            resumed_from_step=self.resumed_from_step,
            wall_s=self.wall_s,
            images_per_s=self.steps * self.global_batch / self.training_s if self.steps else None,
            data_wait_share=waited.total if waited else None,
            data_wait=waited,
            skipped_images=self.skipped_images,
            comm_wait_share=self.comm_wait_s / self.training_s if self.steps else None,
            straggler=self.straggler,
            resident_mb=last.resident_mb if last else None,
            time_to_target_s=self.time_to_target_s,
        )


def find_straggler(waits_s: list[float]) -> tuple[int, float]:
    """The rank that waited least, and by how much less than the others in the middle.  Clocks are not compared."""
    rank = min(range(len(waits_s)), key=waits_s.__getitem__)
    others = waits_s[:rank] + waits_s[rank + 1 :]
    return rank, statistics.median(others) - waits_s[rank] if others else 0.0


def resident_mb() -> float | None:
    """What this process has in memory; None where the system does not say."""
    try:
        _, pages, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6
