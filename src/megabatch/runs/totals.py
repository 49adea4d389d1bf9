"""Records, added up to a summary."""

from msgspec import Struct, field

from megabatch.runs.records import (
    Amount,
    Count,
    EvaluationRecord,
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
    """It goes into checkpoints, so that a resumed run adds on."""

    global_batch: Count
    target_top1: float | None
    steps: Count = 0
    epoch: Passes = 0.0
    skipped_steps: Count = 0
    loss_scale: Scale | None = None
    wall_s: Amount = 0.0
    training_s: Amount = 0.0
    data_wait: TimeBreakdown = field(default_factory=TimeBreakdown)
    unreadable: set[str] = field(default_factory=set)  # training images, each once: every epoch finds them again
    epoch_skipped: Count = 0  # since the epoch began
    comm_wait_s: Seconds = 0.0
    straggler: Straggler | None = None
    evaluation: EvaluationRecord | None = None
    best_top1: Share | None = None
    best_step: Count | None = None
    time_to_target_s: Amount | None = None
    resumed_from_step: Count | None = None
    saves: SaveTimes = field(default_factory=SaveTimes)

    def add(self, record: Record, wall_s: float) -> None:
        self.wall_s = wall_s
        if isinstance(record, StepRecord):
            self.add_step(record)
        else:
            self.add_evaluation(record)

    def add_step(self, record: StepRecord) -> None:
        self.steps = record.step
        self.skipped_steps += record.skipped
        self.loss_scale = record.loss_scale
        self.training_s += self.global_batch / record.images_per_s
        self.data_wait.add(record.data_wait)
        self.unreadable.update(record.skipped_images)
        if int(record.epoch) > int(self.epoch):
            self.epoch_skipped = 0
        self.epoch = record.epoch
        self.epoch_skipped += len(record.skipped_images)
        self.comm_wait_s += record.comm_wait_s
        if record.straggler_delay_s:
            share = record.straggler_delay_s * self.steps / self.training_s
            self.straggler = Straggler(record.straggler, record.straggler_delay_s, share)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation = record
        if self.best_top1 is None or record.top1 > self.best_top1:
            self.best_top1, self.best_step = record.top1, record.step
        reached = self.target_top1 is not None and record.top1 >= self.target_top1
        if reached and self.time_to_target_s is None:
            self.time_to_target_s = self.wall_s

    def summary(self, status: Status) -> Summary:
        last = self.evaluation
        waited = self.data_wait.scaled(1 / self.training_s) if self.training_s else None
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
            images_per_s=self.steps * self.global_batch / self.training_s if self.training_s else None,
            data_wait_share=waited.total if waited else None,
            data_wait=waited,
            skipped_images=len(self.unreadable),
            comm_wait_share=self.comm_wait_s / self.training_s if self.training_s else None,
            straggler=self.straggler,
            resident_mb=last.resident_mb if last else None,
            device_mb=last.device_mb if last else None,
            saves=self.saves,
            time_to_target_s=self.time_to_target_s,
        )


def totals_problem(totals: RunTotals) -> str | None:
    """What in totals from a file contradicts itself, if anything: nothing is counted that was not yet."""
    counted = {
        "skipped_steps": totals.skipped_steps,
        "best_step": totals.best_step or 0,
        "resumed_from_step": totals.resumed_from_step or 0,
        "evaluation.step": totals.evaluation.step if totals.evaluation else 0,
    }
    for name, count in counted.items():
        if count > totals.steps:
            return f"totals.{name} is {count}, and totals.steps {totals.steps}"
    return None
