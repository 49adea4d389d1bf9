"""Running totals of records, from which the summary is made."""

import math

import msgspec
from msgspec import Struct, field

from megabatch.runs.noise import NoiseAverage
from megabatch.runs.records import (
    Amount,
    Count,
    EvaluationRecord,
    NoiseRecord,
    Passes,
    Record,
    SaveTimes,
    Scale,
    Seconds,
    Share,
    Status,
    StepRecord,
    Straggler,
    Summary,
    TimeBreakdown,
)


class RunTotals(Struct, kw_only=True):
    """Totals of a run.  Checkpoints hold them, so that a resumed run continues to count."""

    global_batch: Count
    target_top1: float | None
    patience: Count = 0  # evaluations without a better score that end the run; 0: none
    stop_at_target: bool = False
    since_best: Count = 0  # evaluations
    steps: Count = 0
    epoch: Passes = 0.0
    skipped_steps: Count = 0
    loss_scale: Scale | None = None
    wall_s: Amount = 0.0
    training_s: Amount = 0.0
    data_wait: TimeBreakdown = field(default_factory=TimeBreakdown)
    unreadable: set[str] = field(default_factory=set)  # training images, each once: every epoch reads them again
    epoch_skipped: Count = 0  # this and the next two: since the epoch began
    epoch_top1: Amount = 0.0  # the sum of the steps' top-1
    epoch_steps: Count = 0  # that have a top-1
    training_top1: Share | None = None
    comm_wait_s: Seconds = 0.0
    straggler: Straggler | None = None
    evaluation: EvaluationRecord | None = None
    best_top1: Share | None = None
    best_score: Share | None = None  # top-1, or the mean average precision of multi-label images
    best_step: Count | None = None
    time_to_target_s: Amount | None = None
    resumed_from_step: Count | None = None
    saves: SaveTimes = field(default_factory=SaveTimes)
    noise_average: NoiseAverage = field(default_factory=NoiseAverage)
    noise: NoiseRecord | None = None

    def add(self, record: Record, wall_s: float) -> Record:
        """Add a record, and return it with the values that depend on earlier ones."""
        self.wall_s = wall_s
        record = msgspec.structs.replace(record, wall_s=round(wall_s, 6))
        if isinstance(record, StepRecord):
            if record.noise:
                self.noise = self.noise_average.add(record.noise, self.global_batch)
                record = msgspec.structs.replace(record, noise=self.noise)
            self.add_step(record)
        else:
            self.add_evaluation(record)
        return record

    def add_step(self, record: StepRecord) -> None:
        self.steps = record.step
        self.skipped_steps += record.skipped
        self.loss_scale = record.loss_scale
        self.training_s += self.global_batch / record.images_per_s
        self.data_wait.add(record.data_wait)
        self.unreadable.update(record.skipped_images)
        if math.ceil(record.epoch) > math.ceil(self.epoch):
            self.epoch_skipped, self.epoch_top1, self.epoch_steps = 0, 0.0, 0
        self.epoch = record.epoch
        self.epoch_skipped += len(record.skipped_images)
        if record.top1 is not None:
            self.epoch_top1 += record.top1
            self.epoch_steps += 1
        self.comm_wait_s += record.comm_wait_s
        if record.straggler_delay_s:
            share = record.straggler_delay_s * self.steps / self.training_s
            self.straggler = Straggler(record.straggler, record.straggler_delay_s, share)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation = record
        self.training_top1 = min(1.0, self.epoch_top1 / self.epoch_steps) if self.epoch_steps else None
        self.best_top1 = max(record.top1, self.best_top1 or 0.0)
        if self.best_score is None or record.score > self.best_score:
            self.best_score, self.best_step, self.since_best = record.score, record.step, 0
        else:
            self.since_best += 1
        reached = self.target_top1 is not None and record.top1 >= self.target_top1
        if reached and self.time_to_target_s is None:
            self.time_to_target_s = self.wall_s

    @property
    def end_reason(self) -> str | None:
        """Return why the run ends before its last step, or None.  All ranks have the same evaluations."""
        if self.patience and self.since_best >= self.patience:
            best = f"{self.measure} was best after step {self.best_step}"
            return f"train.patience={self.patience}: {best} (--checkpoint best)"
        if self.stop_at_target and self.time_to_target_s is not None:
            return f"train.stop_at_target=true: top-1 reached {self.target_top1:g}"
        return None

    @property
    def measure(self) -> str:
        """Return the name of the score."""
        is_multi_label = self.evaluation and self.evaluation.mean_average_precision is not None
        return "mAP" if is_multi_label else "top-1"

    def summary(self, status: Status) -> Summary:
        last = self.evaluation
        waited = self.data_wait.scaled(1 / self.training_s) if self.training_s else None
        return Summary(
            status=status,
            top1=last.top1 if last else None,
            top5=last.top5 if last else None,
            best_top1=self.best_top1,
            training_top1=self.training_top1,
            test_loss=last.test_loss if last else None,
            class_top1=last.class_top1 if last else None,
            precision=last.precision if last else None,
            balanced_accuracy=last.balanced_accuracy if last else None,
            f1=last.f1 if last else None,
            ece=last.ece if last else None,
            mean_average_precision=last.mean_average_precision if last else None,
            best_mean_average_precision=self.best_score if self.measure == "mAP" else None,
            samples_evaluated=last.samples_evaluated if last else 0,
            steps=self.steps,
            ended_early=self.end_reason,
            skipped_steps=self.skipped_steps,
            loss_scale=self.loss_scale,
            resumed_from_step=self.resumed_from_step,
            wall_s=self.wall_s,
            images_per_s=self.steps * self.global_batch / self.training_s if self.training_s else None,
            data_wait_share=waited.total if waited else None,
            data_wait=waited,
            skipped_images=len(self.unreadable),
            comm_wait_share=self.comm_wait_s / self.training_s if self.training_s else None,
            straggler=self.straggler,
            resident_mb=last.resident_mb if last else None,
            device_mb=last.device_mb if last else None,
            saves=self.saves,
            noise=self.noise,
            time_to_target_s=self.time_to_target_s,
        )


def totals_problem(totals: RunTotals) -> str | None:
    """Return a contradiction in totals from a file, or None: no count may exceed the number of steps."""
    counted = {
        "skipped_steps": totals.skipped_steps,
        "best_step": totals.best_step or 0,
        "resumed_from_step": totals.resumed_from_step or 0,
        "evaluation.step": totals.evaluation.step if totals.evaluation else 0,
    }
    for name, count in counted.items():
        if count > totals.steps:
            return f"totals.{name}={count} exceeds totals.steps={totals.steps}"
    return None
