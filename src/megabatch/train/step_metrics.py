"""The one small all-reduce of a step: the loss, whether to stop or save, who waited how long, BatchNorm's statistics.

All of them are known when the last forward pass of the step is done, so it runs underneath backward, before the first
gradients.  What of it the host wants to know is copied to it behind the step, while the next one runs: see `Numbers`.
Everything that has as many entries as there are ranks stays on the device, and takes the same few kernels for two ranks
as for thousands.
"""

import torch
from msgspec import Struct

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.optim.optimizers import is_not_finite
from megabatch.ranks.world import World
from megabatch.train.batch_norm import RunningStatistics

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
