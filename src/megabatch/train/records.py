"""What a run leaves behind: a record per step and per evaluation, and a summary of them."""

from typing import Literal

from msgspec import Struct

Status = Literal["finished", "stopped", "failed"]


class StepRecord(Struct, frozen=True, kw_only=True):
    step: int  # optimizer steps taken, from 1
    epoch: float  # passes over the training set
    loss: float  # mean over the global batch, before the update
    lr: float
    images_per_s: float


class EvaluationRecord(Struct, frozen=True, kw_only=True):
    step: int
    epoch: float
    top1: float
    top5: float
    test_loss: float
    class_top1: list[float | None]  # None for a class without test images
    samples_evaluated: int


Record = StepRecord | EvaluationRecord


class Summary(Struct, frozen=True, kw_only=True):
    status: Status
    top1: float | None
    top5: float | None
    best_top1: float | None
    test_loss: float | None
    class_top1: list[float | None] | None
    samples_evaluated: int
    steps: int
    wall_s: float  # from the first step, evaluations included
    images_per_s: float | None  # over all training steps, evaluations left out
    time_to_target_s: float | None  # wall time of the first evaluation that reached train.target_top1


class Tally:
    """Adds records up to a summary."""

    def __init__(self, global_batch: int, target_top1: float | None) -> None:
        self.global_batch, self.target_top1 = global_batch, target_top1
        self.steps = 0
        self.training_s = 0.0
        self.evaluation: EvaluationRecord | None = None
        self.best_top1: float | None = None
        self.time_to_target_s: float | None = None

    def add(self, record: Record, wall_s: float) -> None:
        if isinstance(record, StepRecord):
            self.steps = record.step
            self.training_s += self.global_batch / record.images_per_s
            return
        self.evaluation = record
        self.best_top1 = max(record.top1, self.best_top1 or 0.0)
        reached = self.target_top1 is not None and record.top1 >= self.target_top1
        if reached and self.time_to_target_s is None:
            self.time_to_target_s = wall_s

    def summary(self, status: Status, wall_s: float) -> Summary:
        last = self.evaluation
        return Summary(
            status=status,
            top1=last.top1 if last else None,
            top5=last.top5 if last else None,
            best_top1=self.best_top1,
            test_loss=last.test_loss if last else None,
            class_top1=last.class_top1 if last else None,
            samples_evaluated=last.samples_evaluated if last else 0,
            steps=self.steps,
            wall_s=wall_s,
            images_per_s=self.steps * self.global_batch / self.training_s if self.steps else None,
            time_to_target_s=self.time_to_target_s,
        )
