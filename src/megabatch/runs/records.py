"""The rows of metrics.jsonl, and summary.json.  Every row says what it is (`kind`)."""

from typing import Literal

from msgspec import Struct, field

from megabatch.runs.time_breakdown import TimeBreakdown

Status = Literal["finished", "stopped", "diverged", "failed"]


class StepRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    step: int  # optimizer steps taken, from 1
    epoch: float  # passes over the training set
    loss: float  # mean over the global batch, before the update
    lr: float
    loss_scale: float  # 1 where there is none
    skipped: bool  # gradients overflowed: weights, optimizer and statistics were left as they are
    images_per_s: float
    data_wait_s: float  # rank 0 waited for images
    data_wait: TimeBreakdown = field(default_factory=TimeBreakdown)  # the same, by what was being done to them
    skipped_images: list[str] = field(default_factory=list)  # not readable, and why; another stood in for each
    comm_wait_s: float  # rank 0 waited for other ranks, after all its gradients were ready
    straggler: int  # the rank that has waited least for others so far, since they waited for it
    straggler_delay_s: float  # by how much less than the median of the others, a step
    evaluated: bool = False  # an evaluation follows: the next row


class Evaluation(Struct, frozen=True, kw_only=True):
    top1: float
    top5: float
    test_loss: float  # mean cross-entropy, without label smoothing
    class_top1: list[float | None]  # None for a class without test images
    samples_evaluated: int
    unreadable: list[str] = field(default_factory=list)  # test images that were left out, and why


class EvaluationRecord(Evaluation, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    step: int
    epoch: float
    resident_mb: float | None = None  # memory of rank 0's process
    device_mb: float | None = None  # the most that rank 0 has taken of its accelerator so far; None on a CPU


Record = StepRecord | EvaluationRecord


class Straggler(Struct, frozen=True):
    rank: int
    delay_s: float  # a step, for which the others waited
    share: float  # of the time of training steps


class SaveTimes(Struct, kw_only=True):
    """What checkpoints have cost the steps."""

    count: int = 0  # that were written
    failed: int = 0  # attempts to write one
    overtaken: int = 0  # that were due, and passed over for newer ones because the disk was not done
    stall_s: float = 0.0  # training was held by them, in all
    longest_stall_s: float = 0.0

    def add_stall(self, stall_s: float) -> None:
        self.stall_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)


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
    data_wait: TimeBreakdown | None  # the same, by what was being done to the images
    skipped_images: int  # that could not be read, each counted once, and for which others stood in
    comm_wait_share: float | None
    straggler: Straggler | None  # the rank that delayed the others most, since the last resumption; None on one rank
    resident_mb: float | None  # memory of rank 0's process at the last evaluation
    device_mb: float | None = None  # the most that rank 0 has taken of its accelerator; None on a CPU
    saves: SaveTimes | None = None  # None for a run of an older version
    time_to_target_s: float | None  # wall time of the first evaluation that reached train.target_top1
