"""The small all-reduce of a step: loss, right predictions, stop and save flags, waits of ranks, BatchNorm's statistics.

All of these are known after the last forward pass of the step, so the all-reduce overlaps backward, before the first
gradients.  The numbers that the host needs are copied to it while the next step runs: see `Numbers`.  Tensors with one
entry per rank stay on the device, and take the same few kernels for two ranks as for thousands.
"""

import math
from collections.abc import Mapping

import torch
from msgspec import Struct

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.optim.optimizers import is_not_finite
from megabatch.ranks.world import World
from megabatch.runs.records import StepTimes
from megabatch.telemetry.activity import ALL_REDUCE, BACKWARD
from megabatch.training.batch_norm import RunningStatistics

HEAD = ("loss", "right", "samples", "stop", "save", "skipped")  # the message, before waits and statistics


class StepTotals(Struct, frozen=True):
    """The result of a step over all ranks."""

    loss: float  # mean over the global batch
    top1: float | None  # of the training images, as augmented; None if there is no score per class
    samples: int
    stop: bool  # some rank received a stop signal
    save: bool  # some rank saves the weights
    skipped: list[str]  # images that cannot be read, with the reasons
    overflowed: bool  # gradients overflowed, and the step was skipped
    has_failed: bool  # the loss or gradients are inf or NaN, not because of the loss scale
    straggler: int  # the rank that waited least for others so far
    straggler_delay_s: float  # per step, how much less it waited than the median of the others
    squares: tuple[float, float]  # see `NoiseMeter.squares`


class Numbers:
    """An asynchronous copy of a few numbers from the device to the host.  `read` waits for it."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_host, self.arrived = on_device, None
        if on_device.device.type != "cpu":
            self.on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self.on_host.copy_(on_device, non_blocking=True)
            self.arrived = torch.Event(on_device.device)
            self.arrived.record()

    def read(self) -> list[float]:
        if self.arrived and not self.arrived.query():
            self.arrived.synchronize()
        numbers: list[float] = self.on_host.tolist()
        return numbers


def microbatch_result(loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss and the number of images whose most likely class is right, which is NaN without class scores.

    If an image has several classes, or is a mixture, any class with the largest target is right.
    """
    loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))  # 16 bits cannot count
    if logits.ndim != 2:
        return torch.stack([loss, torch.full_like(loss, math.nan)])
    likely = logits.argmax(1)
    if targets.ndim == 2:
        target, largest = targets.gather(1, likely[:, None])[:, 0], targets.amax(1)
        right = (target == largest) & (largest > 0)
    else:
        right = likely == targets
    return torch.stack([loss, right.sum(dtype=loss.dtype)])


class StepMetrics:
    """The metrics of the current step.

    `add` every microbatch's result, `send` before the last backward pass, `receive` after it, and `read` later.  Steps
    are read in order; the next step may be sent before.
    """

    def __init__(
        self, gradients: GradientAllReduce, running: RunningStatistics, world: World, dtype: torch.dtype
    ) -> None:
        self.gradients, self.running, self.world = gradients, running, world
        self.results: list[torch.Tensor] = []  # of the microbatches of the current step
        self.samples = 0
        self.sent_wait_s: float | None = None  # None: waits before the first step are not sent
        self.num_read = 0
        num_statistics = sum(tensor.numel() for tensor in running.tensors)
        lengths = [len(HEAD), world.num_ranks, num_statistics]
        self.message = torch.zeros(sum(lengths), dtype=dtype, device=world.device)
        self.head, self.waits, self.averages = self.message.split(lengths)
        self.all_waits = torch.zeros(world.num_ranks, dtype=torch.float64, device=world.device)
        self.taken_waits = torch.zeros_like(self.all_waits)
        # 1 from the first step whose loss or gradients are inf or NaN.  Later updates are skipped, even in a step that
        # was launched before the host read this, so that the failed step can be repeated.
        self.has_failed = torch.zeros((), device=world.device)

    def add(self, result: torch.Tensor, samples: int) -> None:
        self.results.append(result)
        self.samples += samples

    def send(self, stop: bool, save: bool, num_skipped: int) -> None:
        results = torch.stack(self.results)
        self.sent_losses = results[:, 0]
        self.message.zero_()
        self.head[:2] = results.sum(0)
        # `fill_` passes the number to a kernel.  A copy from host memory would wait for the device.
        for place, number in enumerate((self.samples, int(stop), int(save), num_skipped), start=2):
            self.head[place].fill_(number)
        waited_s = self.gradients.waited_s
        if self.sent_wait_s is not None:
            self.waits[self.world.rank].fill_(waited_s - self.sent_wait_s)
        if self.running.tensors:
            torch.cat(self.running.tensors, out=self.averages)
        self.future = self.gradients.start_metrics(self.message)
        self.results, self.samples, self.sent_wait_s = [], 0, waited_s

    def receive(self) -> None:
        """Wait for the all-reduce of `head` and `statistics`; on an accelerator, only later kernels wait."""
        self.future.wait()
        self.all_waits += self.waits

    def take_waits(self) -> list[float]:
        """Return the waits of each rank since the last call.  The host waits for the device."""
        waits_s: list[float] = (self.all_waits - self.taken_waits).tolist()
        self.taken_waits = self.all_waits.clone()
        return [round(wait_s, 6) for wait_s in waits_s]

    def note_gradients(self, are_bad: torch.Tensor | None) -> None:
        """Update `has_failed`.  Call it after `receive`.

        Args:
            are_bad: 1 if a gradient of the step is inf or NaN, else 0; None if all are known to be finite.
        """
        self.has_failed = torch.maximum(self.has_failed, is_not_finite(self.head[0]))
        if are_bad is not None:
            self.has_failed = torch.maximum(self.has_failed, are_bad)

    @property
    def statistics(self) -> torch.Tensor:
        """BatchNorm's statistics, the mean over ranks."""
        mean: torch.Tensor = self.averages / self.world.num_ranks
        return mean

    def to_host(self, overflowed: torch.Tensor, squares: torch.Tensor) -> Numbers:
        """Start the copy of a received step's numbers to the host, for `read`."""
        rank, least, median = straggler_of(self.all_waits)
        flags = overflowed.double(), self.has_failed.double()
        return Numbers(torch.stack([*self.head.double().unbind(), *flags, rank, least, median, *squares.unbind()]))

    def read(self, numbers: Numbers, skipped: list[str]) -> StepTotals:
        """Return the totals of a step.  All ranks call it at the same point.

        Args:
            numbers: The result of `to_host` for that step.
            skipped: The images that this rank skipped in that step.
        """
        loss, right, samples, stop, save, num_skipped, overflowed, has_failed, *others = numbers.read()
        rank, least_s, median_s, *squares = others
        delay_s = (median_s - least_s) / max(1, self.num_read)  # a step's waits are sent with the next step
        self.num_read += 1
        return StepTotals(
            loss=loss,
            top1=None if math.isnan(right) else right / samples,
            samples=int(samples),
            stop=stop > 0,
            save=save > 0,
            skipped=[line for lines in self.world.all_gather(skipped) for line in lines] if num_skipped else [],
            overflowed=overflowed > 0,
            has_failed=has_failed > 0,
            straggler=int(rank),
            straggler_delay_s=delay_s,
            squares=(squares[0], squares[1]),
        )


def straggler_of(waits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rank that waited least, its wait, and the median wait of the others.  Needs no common clock."""
    ascending, ranks = waits.sort(stable=True)
    others = ascending[1:] if len(waits) > 1 else ascending
    middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
    return ranks[0].double(), ascending[0], middle.mean()


# The field of `StepTimes` for each activity.  Other activities are in `other`.
PARTS = {part: part for part in ("data", "forward", BACKWARD, "update", "evaluation", "checkpoint")} | {
    ALL_REDUCE: "comm"
}
DIGITS = 6  # microseconds


def step_times(spent_s: Mapping[str, float]) -> StepTimes:
    """Return the times of a step's parts.  They add up to the total of `spent_s`."""
    parts = {part: round(spent_s.get(activity, 0.0), DIGITS) for activity, part in PARTS.items()}
    total_s = sum(spent_s.values())
    return StepTimes(**parts, other=max(0.0, round(total_s - sum(parts.values()), DIGITS)))
