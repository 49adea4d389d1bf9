"""A tensor (or part of one) in an all-reduce, and this rank's phases of a plan."""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.planning.plan import Cut, Phase, Plan, Transfer, slice_of, transfers
from megabatch.planning.topology import Topology

# Keys of small tensors that are all-reduced next to the buckets, the second after the last bucket.
STEP_METRICS, NOISE = -1, -2

RankPhase = tuple[Phase, Transfer]  # a phase and this rank's transfer in it


class RankPhases(NamedTuple):
    """This rank's phases of a plan, split at the network.  Ranks that send nothing keep the same order."""

    before: list[RankPhase]
    network: list[RankPhase]
    after: list[RankPhase]
    crosses: bool  # True if any rank sends over the network

    @property
    def final(self) -> Phase | None:
        """The phase that completes the sum on this rank, if it runs inside the node."""
        phases = self.after if self.crosses else self.before
        return phases[-1][0] if phases else None


@dataclass
class Work:
    """A contiguous flat tensor, or part of one, with the same size and dtype on all ranks."""

    key: int  # index among the tensors of a step; negative if it is not a bucket of DDP
    whole: torch.Tensor
    begin: int  # this part is whole[begin:end]
    end: int
    header: BarrierHeader
    plan: Plan
    phases: RankPhases
    scale: float | None  # factor of the sum
    is_last: bool  # the caller waits for it before it starts another tensor
    future: torch.futures.Future[torch.Tensor] | None  # result of the whole tensor; only the last part has it
    crossed: threading.Event = field(default_factory=threading.Event)

    @property
    def tensor(self) -> torch.Tensor:
        return self.whole[self.begin : self.end]

    def finish(self) -> None:
        if self.future is not None:
            self.future.set_result(self.whole)


def phases_of(plan: Plan, topology: Topology, rank: int, num_elements: int, cut: Cut = slice_of) -> RankPhases:
    """Return the phases in which this rank takes part, for a tensor of this size."""
    phases = list(zip(plan.phases, transfers(plan, topology, rank, num_elements, cut), strict=True))
    network = plan.network
    before, crossing, after = (
        [(phase, transfer) for phase, transfer in part if transfer and has_work(transfer)]
        for part in (phases[: network.start], phases[network], phases[network.stop :])
    )
    return RankPhases(before, crossing, after, plan.crosses)


def has_work(transfer: Transfer) -> bool:
    return len(transfer.members) > 1 and transfer.begin < transfer.end
