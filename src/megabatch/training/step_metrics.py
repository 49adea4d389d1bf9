"""The one small all-reduce of a step: the loss, whether to stop or save, who waited how long, BatchNorm's statistics.

All of them are known when the last forward pass of the step is done, so it runs underneath backward, before the first
gradients.  What of it the host wants to know is copied to it behind the step, while the next one runs: see `Numbers`.
Everything that has as many entries as there are ranks stays on the device, and takes the same few kernels for two ranks
as for thousands.
"""

from collections import deque
from collections.abc import Mapping

import torch
from msgspec import Struct

from megabatch.comm.accelerator.stream_times import DeviceClock
from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.optim.optimizers import is_not_finite
from megabatch.ranks.world import World
from megabatch.runs.records import StepTimes
from megabatch.telemetry.activity import ALL_REDUCE, BACKWARD, START_UP, ActivityTimes, HostTimes, TracedActivity
from megabatch.training.batch_norm import RunningStatistics

HEAD = ("loss", "samples", "stop", "save", "skipped")  # of the message, before waits and statistics


class StepTotals(Struct, frozen=True):
    """Of a step, over all ranks."""

    loss: float  # mean over the global batch
    samples: int
    stop: bool  # some rank was asked to
    save: bool  # somebody wants the weights
    skipped: list[str]  # images that cannot be read, and why
    overflowed: bool  # gradients did, and the step was skipped
    has_failed: bool  # the loss or gradients are inf or NaN, and no loss scale helps
    straggler: int  # the rank that has waited least for others so far
    straggler_delay_s: float  # by how much less than the median of the others, a step


class Numbers:
    """A few numbers on their way from the device to the host, which waits for them only if it reads them too soon."""

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


class StepMetrics:
    """`add` every microbatch's loss, `send` before the last backward pass, `receive` after it; later `read` what came.

    Steps are read in order, and the next one may have been sent before.
    """

    def __init__(
        self, gradients: GradientAllReduce, running: RunningStatistics, world: World, dtype: torch.dtype
    ) -> None:
        self.gradients, self.running, self.world = gradients, running, world
        self.losses: list[torch.Tensor] = []  # of the step
        self.samples = 0
        self.sent_wait_s: float | None = None  # what was waited before the first step is not sent
        self.num_read = 0
        num_statistics = sum(tensor.numel() for tensor in running.tensors)
        lengths = [len(HEAD), world.num_ranks, num_statistics]
        self.message = torch.zeros(sum(lengths), dtype=dtype, device=world.device)
        self.head, self.waits, self.averages = self.message.split(lengths)
        self.all_waits = torch.zeros(world.num_ranks, dtype=torch.float64, device=world.device)
        self.taken_waits = torch.zeros_like(self.all_waits)
        # 1 from the first step on whose loss or gradients are inf or NaN.  Nothing changes from then on, also in a step
        # that was begun before the host has read this: so what went wrong can be repeated.
        self.has_failed = torch.zeros((), device=world.device)

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.losses.append(loss.detach())
        self.samples += samples

    def send(self, stop: bool, save: bool, num_skipped: int) -> None:
        self.sent_losses = torch.stack(self.losses)
        self.message.zero_()
        self.head[0] = self.sent_losses.sum()
        # Each by a kernel that is given the number: a copy from the host's memory would wait for the device.
        for place, number in enumerate((self.samples, int(stop), int(save), num_skipped), start=1):
            self.head[place].fill_(number)
        waited_s = self.gradients.waited_s
        if self.sent_wait_s is not None:
            self.waits[self.world.rank].fill_(waited_s - self.sent_wait_s)
        if self.running.tensors:
            torch.cat(self.running.tensors, out=self.averages)
        self.future = self.gradients.start_metrics(self.message)
        self.losses, self.samples, self.sent_wait_s = [], 0, waited_s

    def receive(self) -> None:
        """From here on `head` and `statistics` are those of all ranks; on an accelerator, for kernels that follow."""
        self.future.wait()
        self.all_waits += self.waits

    def take_waits(self) -> list[float]:
        """Of each rank, since this was last asked; the host waits for the device."""
        waits_s: list[float] = (self.all_waits - self.taken_waits).tolist()
        self.taken_waits = self.all_waits.clone()
        return [round(wait_s, 6) for wait_s in waits_s]

    def note_gradients(self, are_bad: torch.Tensor | None) -> None:
        """After `receive`.  `are_bad`: 1 if a gradient of the step is inf or NaN, else 0; None: none is."""
        self.has_failed = torch.maximum(self.has_failed, is_not_finite(self.head[0]))
        if are_bad is not None:
            self.has_failed = torch.maximum(self.has_failed, are_bad)

    @property
    def statistics(self) -> torch.Tensor:
        """Of BatchNorm, the mean over ranks."""
        mean: torch.Tensor = self.averages / self.world.num_ranks
        return mean

    def to_host(self, overflowed: torch.Tensor) -> Numbers:
        """What `read` wants to know of a step that was received, on its way."""
        rank, least, median = straggler_of(self.all_waits)
        flags = overflowed.double(), self.has_failed.double()
        return Numbers(torch.stack([*self.head.double().unbind(), *flags, rank, least, median]))

    def read(self, numbers: Numbers, skipped: list[str]) -> StepTotals:
        """`skipped`: what this rank has skipped in that step.  All ranks read a step at the same point."""
        loss, samples, stop, save, num_skipped, overflowed, has_failed, rank, least_s, median_s = numbers.read()
        delay_s = (median_s - least_s) / max(1, self.num_read)  # a step's waits are sent in the next
        self.num_read += 1
        return StepTotals(
            loss=loss,
            samples=int(samples),
            stop=stop > 0,
            save=save > 0,
            skipped=[line for lines in self.world.all_gather(skipped) for line in lines] if num_skipped else [],
            overflowed=overflowed > 0,
            has_failed=has_failed > 0,
            straggler=int(rank),
            straggler_delay_s=delay_s,
        )


def straggler_of(waits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank that waited least, how long, and the median of the others'.  Clocks are not compared."""
    ascending, ranks = waits.sort(stable=True)
    others = ascending[1:] if len(waits) > 1 else ascending
    middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
    return ranks[0].double(), ascending[0], middle.mean()


# Where the time of a step goes: the activities of a rank (`ranks.activity`), as the parts of `StepTimes`.
#
# On a CPU the host's clock says how long each took.  On an accelerator, whose host only launches, an event on the
# stream that computes marks where each begins: between two of them the device was at the first, or idle while the
# host was. Events are asked whether they have happened, never waited for, so what a row has is what the device has
# come to; the rest follows in the next.

PARTS = ("data", "forward", BACKWARD, "update", "evaluation", "checkpoint")  # activities that are parts by that name
DIGITS = 6  # microseconds


def step_times(spent_s: Mapping[str, float], comm_s: float = 0.0) -> StepTimes:
    """Adds up to what was spent.  Of backward and the all-reduce after it, `comm_s` was waited for other ranks."""
    backward_s = spent_s.get(BACKWARD, 0.0) + spent_s.get(ALL_REDUCE, 0.0)
    comm_s = min(max(comm_s, 0.0), backward_s)
    parts = {part: spent_s.get(part, 0.0) for part in PARTS} | {BACKWARD: backward_s - comm_s, "comm": comm_s}
    rounded = {part: round(part_s, DIGITS) for part, part_s in parts.items()}
    total_s = sum(spent_s.values())
    return StepTimes(**rounded, other=max(0.0, round(total_s - sum(rounded.values()), DIGITS)))


class DeviceTimes:
    """The seconds of each activity on an accelerator, as far as it has come to them; `take` waits for nothing."""

    def __init__(self, device: torch.device, clock: DeviceClock | None) -> None:
        self.device, self.clock = device, clock
        self.begun: deque[tuple[str, int, torch.Event]] = deque()  # the device is at the first
        self.spare: list[torch.Event] = []
        self.traced: list[TracedActivity] | None = None
        self.begin(START_UP, 0)

    def begin(self, what: str, step: int) -> None:
        event = self.spare.pop() if self.spare else torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        self.begun.append((what, step, event))

    def take(self) -> dict[str, float]:
        spent_s: dict[str, float] = {}
        while len(self.begun) > 1 and self.begun[1][2].query():
            (what, step, began), (_, _, ended) = self.begun.popleft(), self.begun[0]
            spent_s[what] = spent_s.get(what, 0.0) + began.elapsed_time(ended) / 1e3
            if self.traced is not None and self.clock:
                self.traced.append(
                    TracedActivity(what, step, self.clock.seconds_at(began), self.clock.seconds_at(ended))
                )
            self.spare.append(began)
        return spent_s


def activity_times(device: torch.device, clock: DeviceClock | None) -> ActivityTimes:
    return HostTimes() if device.type == "cpu" else DeviceTimes(device, clock)
