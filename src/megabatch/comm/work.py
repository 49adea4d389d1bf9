"""A tensor on its way through an all-reduce, or a part of it; and this rank's share of a plan."""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megabatch.comm.cpu.barrier import Header
from megabatch.planning.plan import Cut, Phase, Plan, Transfer, slice_of, transfers
from megabatch.planning.topology import Topology

STEP_METRICS = -1  # the key of what is all-reduced beside the buckets

RankPhase = tuple[Phase, Transfer]  # of this rank


class RankPhases(NamedTuple):
    """This rank's part of a plan, cut where the whole plan is: a rank that sends nothing keeps the order too."""

    before: list[RankPhase]
    network: list[RankPhase]
    after: list[RankPhase]
    crosses: bool  # some rank has something to send

    @property
    def final(self) -> Phase | None:
        """What leaves the whole sum on this rank, if that happens in the node."""
        phases = self.after if self.crosses else self.before
        return phases[-1][0] if phases else None


@dataclass
class Work:
    """Contiguous and flat, and the same on all ranks but for its values."""

    key: int  # its place among the tensors of a step; negative: none of DDP's buckets
    whole: torch.Tensor
    begin: int  # this part of the whole
    end: int
    header: Header
    plan: Plan
    phases: RankPhases
    scale: float | None  # of the sum
    is_last: bool  # nothing follows before somebody waits for it
    future: torch.futures.Future[torch.Tensor] | None  # of the whole, with its last part
    crossed: threading.Event = field(default_factory=threading.Event)

    @property
    def tensor(self) -> torch.Tensor:
        return self.whole[self.begin : self.end]

    def finish(self) -> None:
        if self.future is not None:
            self.future.set_result(self.whole)


def phases_of(plan: Plan, topology: Topology, rank: int, num_elements: int, cut: Cut = slice_of) -> RankPhases:
    """What the rank does in each phase of the plan, for a tensor of this size."""
    phases = list(zip(plan.phases, transfers(plan, topology, rank, num_elements, cut), strict=True))
    network = plan.network
    before, crossing, after = (
        [(phase, transfer) for phase, transfer in part if transfer and has_work(transfer)]
        for part in (phases[: network.start], phases[network], phases[network.stop :])
    )
    return RankPhases(before, crossing, after, plan.crosses)


def has_work(transfer: Transfer) -> bool:
    return len(transfer.members) > 1 and transfer.begin < transfer.end
