"""What a run says while it goes: a header, a live bar on a terminal or plain lines elsewhere, and the result."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megabatch import __version__
from megabatch.comm.world import World
from megabatch.config import RunConfig
from megabatch.train.records import EvaluationRecord, Record, StepRecord, Summary
from megabatch.train.trainer import Training

QUIET_S = 10.0  # where there is no live bar, a line at least this often


class Screen:
    def __init__(self, config: RunConfig, recipe: str, training: Training, world: World, folder: Path) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.plan, self.folder, self.target_top1 = training.plan, folder, config.train.target_top1
        self.last_step: StepRecord | None = None
        self.spoke_s = time.monotonic()
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]:.2f}  step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]:.4f}  lr {task.fields[lr]:.4f}  {task.fields[speed]:,.0f} images/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=self.plan.num_steps, epoch=0.0, loss=0.0, lr=0.0, speed=0.0)
        for name, text in header(config, recipe, training, world).items():
            self.say(name, text)
        self.say("folder", str(folder))

    def say(self, name: str, text: str) -> None:
        self.console.print(f"[bold]{name:<9}[/bold] {escape(text)}")

    def show(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self.line(f"top-1 {record.top1:.4f}  top-5 {record.top5:.4f}")
            return
        self.last_step = record
        self.bar.update(
            self.task,
            completed=record.step,
            epoch=record.epoch,
            loss=record.loss,
            lr=record.lr,
            speed=record.images_per_s,
        )
        if not self.console.is_terminal and time.monotonic() - self.spoke_s > QUIET_S:
            self.line("")

    def line(self, result: str) -> None:
        step = self.last_step
        assert step is not None
        self.console.print(
            f"epoch {step.epoch:6.2f}  step {step.step:>6}  loss {step.loss:.4f}  lr {step.lr:.4f}  "
            f"{step.images_per_s:>7,.0f} images/s  {result}".rstrip()
        )
        self.spoke_s = time.monotonic()

    def finish(self, summary: Summary) -> None:
        self.bar.stop()
        if summary.top1 is None:
            self.say(summary.status, f"after {summary.steps} of {self.plan.num_steps} steps, not evaluated yet")
        else:
            self.say(
                summary.status,
                f"top-1 {summary.top1:.4f} (best {summary.best_top1:.4f}), top-5 {summary.top5:.4f} "
                f"on {summary.samples_evaluated:,} samples after {summary.steps} of {self.plan.num_steps} steps",
            )
        speed = f", {summary.images_per_s:,.0f} images/s" if summary.images_per_s else ""
        self.say("time", f"{summary.wall_s:.1f} s{speed}{self.target_text(summary)}")
        self.say("folder", str(self.folder))

    def target_text(self, summary: Summary) -> str:
        if self.target_top1 is None:
            return ""
        if summary.time_to_target_s is None:
            return f", target {self.target_top1:g} not reached"
        return f", target {self.target_top1:g} reached after {summary.time_to_target_s:.1f} s"

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def header(config: RunConfig, recipe: str, training: Training, world: World) -> dict[str, str]:
    plan = training.plan
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    return {
        "megabatch": f"{__version__}, torch {torch.__version__}, {ranks} on {world.device.type}, {threads} each",
        "recipe": f"{recipe}: {config.model.name}, {num_parameters:,} parameters, {config.precision.name}",
        "data": f"{config.data.source}, {plan.num_samples:,} training images",
        "batch": f"{plan.global_batch} = {plan.microbatch} micro x {plan.accumulation} accumulated x {ranks}",
        "steps": f"{plan.num_steps} in {config.train.epochs:g} epochs, "
        f"{config.optim.name} at {config.optim.learning_rate:g}",
    }
