"""The output of a run: a header, a live bar on a terminal or plain lines elsewhere, and the result."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from statistics import harmonic_mean
from typing import Any, Self

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megabatch import __version__
from megabatch.comm.gradient_all_reduce import PlansInUse
from megabatch.config.reference_results import preflight
from megabatch.config.resolve import describe_epochs
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import FROM_PYTHON
from megabatch.data.pipeline.images import DataSet
from megabatch.io.numbers import duration, megabytes, milliseconds, plural
from megabatch.io.terminal import Terminal
from megabatch.optim.groups import LR_FACTOR, OPTIMIZER, UNTIL
from megabatch.planning.sizes import describe_sides
from megabatch.precision.loss_scale import show_scale
from megabatch.ranks.signals import was_launched
from megabatch.runs.epochs import warn_of_noise
from megabatch.runs.files import TIMELINE, WEIGHTS
from megabatch.runs.noise import describe_noise
from megabatch.runs.records import EvaluationRecord, Record, SaveTimes, StepRecord, Summary, TimeBreakdown
from megabatch.text import one_line
from megabatch.training.device import accelerator_name, warn_of_device
from megabatch.training.parts import Training

REPORTED_DRIFT = 1.5  # expected time of all-reduces, relative to the time when they were chosen
REPORTED_STRAGGLER_SHARE = 0.05  # of the time, waiting for one rank
REPORTED_DATA_SHARE = 0.005  # of the time, waiting for images
MOST_LISTED = 10  # classes
LONGEST_CLASS = 30  # characters of a name
QUIET_S = 10.0  # without a live bar, print a line at least this often


class Screen:
    def __init__(self, config: RunConfig, training: Training, folder: Path) -> None:
        self.console = Terminal()
        self.plan, self.folder, self.target_top1 = training.plan, folder, config.train.target_top1
        self.has_timeline = config.comm.timeline
        self.from_python = config.data.source.startswith(FROM_PYTHON)
        # A user's model is named in commands: a run's folder does not choose the code to import.
        self.user_model = config.model.name if config.model.is_user_model else None
        self.last_step: StepRecord | None = None
        self.unprinted: list[StepRecord] = []  # the steps since the last line
        self.reported_images: set[str] = set()
        self.printed_s = time.monotonic()
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]:.2f} step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=6),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_live,
            transient=True,
        )
        self.task = self.bar.add_task("", total=self.plan.num_steps, epoch=0.0, text="", visible=False)
        for name, text in header(config, training).items():
            self.print_row(name, text)
        for line in training.initial_weights:
            self.print_row("weights", line)
        findings = preflight(config, self.plan.num_samples)
        for line in findings.references:
            self.print_row("reference", line)
        on_device = warn_of_device(config.precision, training.world.device.type)
        of_noise = warn_of_noise(config.name, self.plan.global_batch, self.plan.microbatch)
        for line in [*training.data.warnings, *findings.warnings, *on_device, *([of_noise] if of_noise else [])]:
            self.print_row("warning", line)
        self.print_row("folder", str(folder))

    def print_row(self, name: str, text: str) -> None:
        with suppress(OSError):  # a closed pipe, or a full disk
            self.console.row(name, text)

    def show_resumption(self, step: int, computed_by: str, now: str) -> None:
        note = "" if computed_by == now else f", computed by {computed_by}: the run is the same only up to rounding"
        self.print_row("resumes", f"after step {step} of {self.plan.num_steps}{note}")

    def show_drift(self, drift: float) -> None:
        if not 1 / REPORTED_DRIFT < drift < REPORTED_DRIFT:
            retune = "retune=True" if self.from_python else "--retune"
            self.print_row(
                "drift",
                f"all-reduces are expected to take {drift:.1f} times as long as when they were chosen, because links "
                f"changed; use {retune} to choose again",
            )

    def show(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self.show_skipped(record.unreadable, "left out")
            raw = "" if record.raw_top1 is None else f" raw {record.raw_top1:.4f}"
            mean = "" if record.mean_average_precision is None else f"mAP {record.mean_average_precision:.4f} "
            self.line(f"{mean}top-1 {record.top1:.4f}{raw} top-5 {record.top5:.4f}")
            return
        self.last_step = record
        self.unprinted.append(record)
        if record.skipped:
            self.print_row(
                "skipped", f"step {record.step}: a gradient overflowed with loss scale {show_scale(record.loss_scale)}"
            )
        self.show_skipped(record.skipped_images, "skipped")
        text = f"loss {record.loss:.3f} lr {show_rate(record.lr)} {record.images_per_s:,.0f}/s {self.waits([record])}"
        self.bar.update(self.task, completed=record.step, epoch=record.epoch, text=text, visible=True)
        if not self.console.is_live and time.monotonic() - self.printed_s > QUIET_S:
            self.line("")

    def show_skipped(self, lines: Iterable[str], name: str) -> None:
        """Print each image once, although every epoch reads it again."""
        for line in lines:
            if line not in self.reported_images:
                self.reported_images.add(line)
                self.print_row(name, line)

    def line(self, result: str) -> None:
        """Print the last step's loss and the throughput since the last line.

        On a terminal a line has at most 80 characters.  Elsewhere it also has the waits, which a terminal shows in the
        bar.
        """
        step = self.last_step
        assert step is not None
        steps = self.unprinted or [step]
        images_per_s = harmonic_mean(step.images_per_s for step in steps)
        line = f"epoch {step.epoch:5.2f} step {step.step:>5} loss {step.loss:.4f} lr {show_rate(step.lr)} "
        line += f"{images_per_s:>6,.0f}/s "
        if not self.console.is_live:
            left_s = (self.plan.num_steps - step.step) * self.plan.global_batch / images_per_s
            result += f"  {self.waits(steps)} ETA {left_s:.0f} s"
        with suppress(OSError):
            self.console.print(line + result)
        self.unprinted, self.printed_s = [], time.monotonic()

    def waits(self, steps: Sequence[StepRecord]) -> str:
        """Return the shares of the steps' time that rank 0 waited for images and for other ranks."""
        took_s = sum(self.plan.global_batch / step.images_per_s for step in steps)
        data_s = sum(step.data_wait_s for step in steps)
        comm_s = sum(step.comm_wait_s for step in steps)
        return f"data {data_s / took_s:.0%} comm {comm_s / took_s:.0%}"

    def finish(self, summary: Summary) -> None:
        self.bar.stop()
        if summary.top1 is None:
            self.print_row(summary.status, "not evaluated yet")
        else:
            mean, best = summary.mean_average_precision, summary.best_mean_average_precision
            ranked = "" if mean is None else f"mAP {mean:.4f} (best {best:.4f}), "
            self.print_row(
                summary.status,
                f"{ranked}top-1 {summary.top1:.4f} (best {summary.best_top1:.4f}), top-5 {summary.top5:.4f} "
                f"on {summary.samples_evaluated:,} images",
            )
        if summary.training_top1 is not None:
            self.print_row("training", f"top-1 {summary.training_top1:.4f} in the last epoch, on augmented images")
        if summary.ended_early:
            self.print_row("ended", f"early, by {summary.ended_early}")
        speed = f", {summary.images_per_s:,.0f} images/s" if summary.images_per_s else ""
        steps = f"{summary.steps} of {self.plan.num_steps} steps"
        self.print_row("time", f"{summary.wall_s:.1f} s, {steps}{speed}{self.target_text(summary)}")
        if summary.skipped_steps:
            skipped = f"{summary.skipped_steps} of {summary.steps} steps, whose gradients overflowed"
            none_left = ": the model was not trained" * (summary.skipped_steps == summary.steps)
            scale = show_scale(summary.loss_scale or 1.0)
            self.print_row("skipped", f"{skipped}{none_left}; the last step's loss scale was {scale}")
        if summary.data_wait_share is not None and summary.comm_wait_share is not None:
            data = f"{summary.data_wait_share:.1%} for data{describe_breakdown(summary.data_wait)}"
            self.print_row("waited", f"{data}, {summary.comm_wait_share:.1%} for communication")
        if summary.skipped_images:
            self.print_row(
                "skipped",
                f"{summary.skipped_images:,} images that could not be read; neighbouring images replaced them",
            )
        if summary.noise:
            self.print_row("noise", describe_noise(summary.noise))
        if summary.resident_mb:
            self.print_row("memory", describe_memory(summary.resident_mb, summary.device_mb))
        if summary.saves.count and summary.images_per_s:
            self.print_row("saves", describe_saves(summary.saves, self.plan.global_batch / summary.images_per_s))
        late = summary.straggler
        if late and late.share > REPORTED_STRAGGLER_SHARE:
            delay = f"{milliseconds(late.delay_s)} per step ({late.share:.0%})"
            self.print_row("straggler", f"rank {late.rank}: the other ranks waited for it, {delay}")
        if summary.status == "finished":
            self.print_row("weights", str(self.folder / WEIGHTS))
        if self.has_timeline:
            self.print_row("timeline", f"{self.folder / TIMELINE}: a trace per rank; open it in ui.perfetto.dev")
        if not self.from_python:  # calling `fit` again resumes
            if summary.status == "finished":
                named = f" --model {self.user_model}" if self.user_model else ""
                self.print_row("again", f"megabatch eval {quote(str(self.folder))}{named}")
            else:
                named = f" model.name={self.user_model}" if self.user_model else ""
                ranks = f" --ranks {self.plan.num_ranks}" if was_launched() else ""  # else under the same launcher
                self.print_row("resume", f"megabatch train{named} --resume {quote(str(self.folder))}{ranks}")

    def target_text(self, summary: Summary) -> str:
        if self.target_top1 is None:
            return ""
        if summary.time_to_target_s is None:
            return f", target {self.target_top1:g} not reached"
        return f", target {self.target_top1:g} reached after {summary.time_to_target_s:.1f} s"

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def describe_memory(resident_mb: float, device_mb: float | None) -> str:
    on_device = f", at most {megabytes(device_mb)} on its GPU" if device_mb is not None else ""
    return f"{megabytes(resident_mb)} on rank 0{on_device}"


def describe_saves(saves: SaveTimes, step_s: float) -> str:
    longest, step, total = map(duration, (saves.longest_stall_s, step_s, saves.stall_s))
    times = f"{saves.count:,} checkpoint{'s' * (saves.count > 1)}"
    failed = f" ({saves.failed:,} more failed)" if saves.failed else ""
    failed += f" ({saves.overtaken:,} more skipped because the disk was busy)" if saves.overtaken else ""
    return f"{times}{failed}; training stalled {total} in total, {longest} at most (a step takes {step})"


def describe_breakdown(shares: TimeBreakdown | None) -> str:
    """Return the stages of the wait for data, or "" if the wait is short."""
    if shares is None or shares.total < REPORTED_DATA_SHARE:
        return ""
    parts = {part: getattr(shares, part) for part in shares.__struct_fields__}
    return f" ({', '.join(f'{part} {share:.1%}' for part, share in parts.items() if share >= 0.0005)})"


def show_rate(learning_rate: float) -> str:
    return f"{learning_rate:.4f}" if learning_rate >= 0.001 else f"{learning_rate:.1e}"


def header(config: RunConfig, training: Training) -> dict[str, str]:
    plan = training.plan
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    device = training.world.device
    device_name = "cpu" if device.type == "cpu" else accelerator_name(device)
    return {
        "megabatch": f"{__version__}, torch {torch.__version__}, {ranks} on {device_name}, {threads} each",
        "recipe": f"{config.name}: {config.model.name}, {num_parameters:,} parameters"
        + (", compiled" if config.model.compile else ", in CUDA graphs" if training.graph else ""),
        "precision": describe_precision(config, training),
        "data": describe_data(config, training),
        **describe_weights(training),
        "batch": f"{plan.global_batch} = {plan.microbatch} micro x {plan.accumulation} accumulated x {ranks}",
        "steps": f"{plan.num_steps} in {describe_epochs(config, plan.num_samples)}, "
        f"{training.optimizer_name} at {config.optim.learning_rate:g}",
        "groups": describe_groups(config, training.optimizer.param_groups),
        **describe_average(config, training),
        "allreduce": describe_plans(training.gradients.plans, len(training.gradients.layouts.seen)),
    }


def describe_weights(training: Training) -> dict[str, str]:
    weights = training.class_weights
    if weights is None:
        return {}
    low, high = (
        f"{value:.3g} ({one_line(training.data.class_names[weights.index(value)], LONGEST_CLASS)})"
        for value in (min(weights), max(weights))
    )
    return {"loss": f"weights {low} to {high}"}


def describe_average(config: RunConfig, training: Training) -> dict[str, str]:
    average, settings = training.average, config.train
    if average.decay is None:
        return {}
    every = f"every {average.every} steps" if average.every > 1 else "every step"
    return {
        "average": f"weights with a half-life of {settings.ema_half_life_epochs:g} epochs, updated {every} with "
        f"decay {average.decay:.6g}; it is evaluated and stored"
    }


def describe_groups(config: RunConfig, groups: Sequence[dict[str, Any]]) -> str:
    """Return each group with its own settings, or only the learning rates of many groups."""
    peak = config.optim.learning_rate
    if len(groups) > MOST_LISTED:
        rates = [peak * group.get(LR_FACTOR, 1.0) for group in groups]
        return (
            f"{len(groups)}, with learning rates from {min(rates):.3g} to {max(rates):.3g}; megabatch show lists them"
        )
    described = []
    for group in groups:
        facts = [f"decay {group.get('weight_decay', 0.0):g}"]
        facts += [f"learning rate {peak * group[LR_FACTOR]:g}"] if LR_FACTOR in group else []
        facts += [f"by {group[OPTIMIZER]}"] if OPTIMIZER in group else []
        facts += [f"until {group[UNTIL]:.3g} of the run"] if UNTIL in group else []
        described.append(f"{len(group['params'])} {group['name']} ({', '.join(facts)})")
    return ", ".join(described)


def describe_plans(in_use: PlansInUse, num_seen: int) -> str:
    tuning = in_use.tuning
    plans = list(dict.fromkeys(bucket.plan for bucket in tuning.buckets)) if tuning else [in_use.default]
    num_buckets = len(tuning.buckets) if tuning else num_seen
    text = f"{'; '.join(map(str, plans))}; {num_buckets} bucket{'s' if num_buckets > 1 else ''}"
    if tuning and tuning.topology.num_nodes > 1:
        text += f"; a step is expected to wait {milliseconds(tuning.exposed_s)} for them"
    return text


def describe_precision(config: RunConfig, training: Training) -> str:
    scale = training.loss_scale
    master_weights = ", fp32 master weights" if training.master_weights.copies else ""
    return (
        config.precision.name
        + master_weights
        + (f", {scale.kind} loss scale {show_scale(scale.value)}" if scale.is_on else "")
    )


def describe_data(config: RunConfig, training: Training) -> str:
    data, settings = training.data, config.data
    sides = describe_sides(settings.sizes, settings.image_size, settings.test_side)
    return (
        f"{settings.source}: {len(data.train):,} + {len(data.test):,} images of {sides}, "
        f"{plural(data.num_channels, 'channel')}, {describe_classes(data)}"
        + (f"; tested on {data.tested_on}" if data.tested_on else "")
        + "; balanced" * (settings.sampling == "balanced")
        + "; several labels per image" * settings.multi_label
    )


def describe_classes(data: DataSet) -> str:
    """Return the number of classes, and the names and training images of a few, or the smallest and largest."""
    counts = data.count_classes()
    each = [f"{one_line(name, LONGEST_CLASS)} {count:,}" for name, count in zip(data.class_names, counts, strict=True)]
    if len(each) > MOST_LISTED:
        low, high = (each[counts.index(choose(counts))] for choose in (min, max))
        each = [low, "...", high] if low != high else [f"{counts[0]:,} each"]
    return f"{plural(len(data.class_names), 'class', 'classes')} ({', '.join(each)})"
