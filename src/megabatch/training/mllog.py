"""MLPerf's log of a run (`run.mllog`): lines `:::MLLOG {...}` in mllog.txt, which MLPerf's tools read.

The keys are those of the closed division's ResNet-50.  The log ends when `train.target_top1` is reached, like an
MLPerf run, or else with the run and the status "aborted".  Our warm-up passes read one real microbatch before
`run_start`, and nothing clears the caches of the system, so the log is not a submission.
"""

import inspect
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megabatch.config.resolve import in_epochs
from megabatch.config.schema import RunConfig
from megabatch.io.disk import private
from megabatch.runs.files import MLLOG
from megabatch.runs.records import EvaluationRecord, Record, StepRecord
from megabatch.training.parts import Training

IMPORTED_S = time.time()  # the process starts
POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
Value = str | int | float | bool | None


class MlperfLog:
    """Rank 0's log. It ends at the first failed write, since it is not worth a run."""

    def __init__(self, config: RunConfig, training: Training, folder: Path) -> None:
        self.target_top1, self.is_in_block = config.train.target_top1, False
        self.epoch, self.block_epochs = 0, max(1, config.train.evaluate_every)  # epoch: of the last evaluation
        self.file = open(folder / MLLOG, "w", opener=private, encoding="utf-8")  # noqa: SIM115 - closed by `end`
        self.event("init_start", START, time_s=IMPORTED_S)
        for key, value in constants(config, training):
            self.event(key, POINT, value)
        self.event("init_stop", END)
        self.event("run_start", START)

    def event(
        self, key: str, kind: str, value: Value = None, *, time_s: float | None = None, **metadata: Value
    ) -> None:
        caller = inspect.stack(0)[1]
        line = {
            "namespace": "",
            "time_ms": round(1e3 * (time.time() if time_s is None else time_s)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": Path(caller.filename).name, "lineno": caller.lineno} | metadata,
        }
        if not self.file.closed:
            try:
                self.file.write(f":::MLLOG {json.dumps(line)}\n")
                self.file.flush()
            except OSError:
                self.close()

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.write_step(record)
        elif isinstance(record, EvaluationRecord):
            self.event("eval_accuracy", POINT, record.top1, epoch_num=self.epoch)
            self.event("eval_stop", END, epoch_num=self.epoch)
            if self.target_top1 is not None and record.top1 >= self.target_top1:
                self.end("success")

    def write_step(self, record: StepRecord) -> None:
        """Log the block of epochs between two evaluations. Rows are written after their steps."""
        if not self.is_in_block:
            self.event("block_start", START, first_epoch_num=self.epoch + 1, epoch_count=self.block_epochs)
            self.is_in_block = True
        if record.evaluated:
            self.event("block_stop", END, first_epoch_num=self.epoch + 1)
            self.epoch, self.is_in_block = max(self.epoch + 1, round(record.epoch)), False
            self.event("eval_start", START, epoch_num=self.epoch)

    def end(self, status: str = "aborted") -> None:
        """Write the last line, unless the log has ended."""
        self.event("run_stop", END, status=status)
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


def constants(config: RunConfig, training: Training) -> Iterator[tuple[str, Value]]:
    """Yield the settings that MLPerf's rules name.  `lars_opt_...` and `sgd_opt_...` differ in the prefix only."""
    plan, optim, schedule = training.plan, config.optim, config.schedule
    yield "submission_benchmark", "resnet"
    yield "submission_division", "closed"
    yield "submission_org", "none"
    yield "submission_platform", f"{plan.num_ranks} x {training.world.device.type}"
    yield "submission_status", "research"
    yield "cache_clear", False
    yield "seed", config.seed
    yield "global_batch_size", plan.global_batch
    yield "gradient_accumulation_steps", plan.accumulation
    yield "model_bn_span", plan.microbatch
    yield "train_samples", plan.num_samples
    yield "eval_samples", len(training.data.test)
    yield "opt_name", optim.name
    warmup = in_epochs(config, plan.num_samples).schedule.warmup_epochs
    prefix = f"{optim.name}_opt"
    yield f"{prefix}_base_learning_rate", optim.learning_rate
    yield f"{prefix}_end_learning_rate", schedule.end
    if schedule.decay == "poly":
        yield f"{prefix}_learning_rate_decay_poly_power", schedule.power
    yield f"{prefix}_learning_rate_decay_steps", plan.num_steps
    yield f"{prefix}_momentum", optim.momentum
    yield f"{prefix}_weight_decay", optim.weight_decay
    if optim.name == "lars":
        yield "lars_epsilon", optim.eps_of("lars")
        yield "lars_opt_learning_rate_warmup_epochs", warmup
    else:
        yield "opt_learning_rate_warmup_epochs", warmup
