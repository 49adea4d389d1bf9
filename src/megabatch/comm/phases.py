"""Run the phases of a plan on this rank: in shared memory inside the node, otherwise with a process group.

The order of a rank's work inside its node (`NodeOrder`), before and after buckets cross the network:

Legend: buckets (on CPUs, parts of buckets) a, b, c, d, ...; 1 is the work before the network, 3 the work after it.

    a1 b1 c1 d1 a3 e1 b3 f1 c3 ...      the last one of a step: h1 e3 f3 g3 h3

The order does not depend on the speed of the network, because all ranks of a node must run the same operation at the
same time.  Both threads (cpu/workers.py) and streams (accelerator/streams.py) use it.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar

import torch

from megabatch.comm.accelerator.device_group import DeviceGroup
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.cpu.shared_memory import SharedBuffer
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import Groups
from megabatch.comm.work import RankPhase, Work
from megabatch.planning.plan import Phase, Transfer
from megabatch.planning.topology import Axis


class PhaseTimes(Protocol):
    """A timeline, or events on streams."""

    def enter_phase(self, work: Work, phase: Phase, transfer: Transfer) -> None: ...

    def leave_phase(self, phase: Phase, waited_s: float) -> None: ...


class PhaseRunner:
    def __init__(self, groups: Groups, failure: FirstError, timeline: PhaseTimes) -> None:
        self.groups, self.failure, self.timeline = groups, failure, timeline
        self.waited_s = 0.0  # total time waiting for other ranks of this node
        self.buffers: dict[int, tuple[torch.Tensor, SharedBuffer]] = {}
        self.checks = False  # check sums for inf and NaN while they are in the cache
        self.finite_elements = 0  # elements of sums that have neither
        self.compared: dict[tuple[Axis, int], int] = {}  # the layout of each bucket on which the members agreed

    def run(self, work: Work, phases: list[RankPhase]) -> None:
        """Run the phases in order.  After the first error, nothing is exchanged."""
        for phase, transfer in phases:
            if self.failure.has_failed:
                return
            waited_s = self.waited_s
            try:
                self.timeline.enter_phase(work, phase, transfer)
                if phase.axis == "node" and self.groups.memory:
                    self.run_in_memory(work, phase, is_final=phase is work.phases.final)
                else:
                    group = self.process_group_for(work, phase.axis)
                    operation = "backend_all_reduce" if phase.backend else phase.op
                    getattr(group, operation)(work.tensor[transfer.begin : transfer.end], phase.dtype)
                self.timeline.leave_phase(phase, self.waited_s - waited_s)
            except BaseException as error:
                self.failure.record(error, work.header, phase.axis)

    def scale(self, work: Work) -> None:
        """Scale before the sum, as DDP does: the sum may overflow in 16 bits when the average does not."""
        if work.scale is not None and not self.failure.has_failed and not self.is_scaled_in_memory(work):
            work.tensor.mul_(work.scale)

    def is_scaled_in_memory(self, work: Work) -> bool:
        """Return True if one all-reduce in shared memory is the whole plan: it scales the sum before rounding."""
        return self.groups.memory is not None and len(work.phases.before) == 1 and not work.phases.crosses

    def process_group_for(self, work: Work, axis: Axis) -> ProcessGroup | DeviceGroup:
        """Return the process group after its members agreed on the tensor.

        The check costs a round trip, so it runs once for each bucket that DDP makes.  Shared memory checks every
        operation.
        """
        group = self.groups.process_groups[axis]
        if not self.is_compared(work, axis):
            group.require_same(work.header.layout, work.whole)
            self.compared[axis, work.key] = work.header.layout
        return group

    def is_compared(self, work: Work, axis: Axis) -> bool:
        return self.compared.get((axis, work.key)) == work.header.layout

    def run_in_memory(self, work: Work, phase: Phase, is_final: bool) -> None:
        memory = self.groups.memory
        assert memory is not None
        waited_s = memory.waited_s
        buffer = self.shared(work)
        checks = self.checks and is_final and work.key >= 0
        match phase.op:
            case "all_reduce":
                memory.all_reduce(buffer, work.header, work.scale if self.is_scaled_in_memory(work) else None, checks)
            case "reduce_scatter":
                memory.reduce_scatter(buffer, work.header)
            case "all_gather":
                memory.all_gather(buffer, work.header, checks)
            case "reduce":
                memory.reduce(buffer, 0, work.header)
            case "broadcast":
                memory.broadcast(buffer, 0, work.header, checks)
        if checks and memory.is_finite:
            self.finite_elements += work.end - work.begin
        self.waited_s += memory.waited_s - waited_s

    def shared(self, work: Work) -> SharedBuffer:
        """Return the part in shared memory.  The whole tensor stays there, because DDP reuses its buckets."""
        known, buffer = self.buffers.get(work.key, (None, None))
        if known is None or buffer is None or known.data_ptr() != work.whole.data_ptr():
            assert self.groups.memory is not None
            buffer = self.groups.memory.share(work.whole, work.header)
            self.buffers[work.key] = work.whole, buffer  # holds a reference, so that no other tensor gets its address
        if work.is_last and work.key >= 0:  # DDP may have had more buckets before it rebuilt them
            for key in [key for key in self.buffers if key > work.key]:
                del self.buffers[key]
        return buffer.part(work.begin, work.end)


DEPTH = 3  # buckets in flight when the node continues with the oldest of them

Crossing = TypeVar("Crossing")


class NodeOrder(Generic[Crossing]):
    def __init__(self) -> None:
        self.in_flight: deque[Crossing] = deque()

    def due_after(self, crossing: Crossing, is_last: bool) -> list[Crossing]:
        """Add a bucket that starts to cross.  Return those whose work after the network is due, oldest first."""
        self.in_flight.append(crossing)
        num_due = len(self.in_flight) - (0 if is_last else DEPTH)
        return [self.in_flight.popleft() for _ in range(num_due)]
