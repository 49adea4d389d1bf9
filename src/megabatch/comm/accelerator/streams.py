"""All-reduce of an accelerator's tensors on two separate streams.  The host does not wait.

The phases of a bucket within the node are issued on one stream, its network phases on the other, in the order of the
two threads on CPUs (cpu/workers.py, phases.py).  Buckets are not split into parts, because a launch has a fixed cost:

    in the node    a1 b1 c1 d1 a3 e1 b3 f1 ...        each waits, on its stream, for its input:
    network        a2 b2 c2 d2 e2 ...                 a1 for backward, a2 for a1, a3 for a2

Each process group is used on only one stream, because a communicator is one queue: if a3 were issued before b1, b1
would wait for the network.  All ranks issue the same collectives in the same order, at any progress of their devices.

The future of an all-reduce is completed when its last phase is issued; waiting for it makes the caller's stream wait.
Temporary buffers belong to the process groups, on the stream of each.  A tensor needs no `record_stream`, because its
owner waits for the future, on the stream that allocated the tensor, before it frees it (as DDP and StepMetrics do).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import Groups
from megabatch.comm.phases import NodeOrder, PhaseRunner
from megabatch.comm.work import RankPhases, Work, phases_of
from megabatch.planning.plan import Plan, padded_slice_of
from megabatch.planning.topology import Axis

POLL_S = 1e-3
HIGH = -1  # a collective gets its few blocks as soon as any block of backward ends


class OnNetwork(NamedTuple):
    work: Work
    crossed: torch.Event


class StreamReducer:
    in_parts = False

    def __init__(self, groups: Groups, failure: FirstError, times: StreamTimes) -> None:
        self.groups, self.failure, self.times = groups, failure, times
        self.runner = PhaseRunner(groups, failure, times)
        self.node, self.network = (torch.Stream(groups.device, priority=HIGH) for _ in range(2))
        self.order: NodeOrder[OnNetwork] = NodeOrder()
        self.started: dict[int, Work] = {}  # all-reduces that are not completely issued, by id
        self.phases_for = cache(self.cut_phases)

    def cut_phases(self, plan: Plan, num_elements: int) -> RankPhases:
        return phases_of(plan, self.groups.topology, self.groups.rank, num_elements, padded_slice_of)

    @property
    def waited_s(self) -> float:
        """Total time in collectives that have ended on the device.  The straggler waits least."""
        return self.times.waited_s

    @contextmanager
    def stream_of(self, axis: Axis) -> Iterator[None]:
        """Make the stream of this axis's process group current.  Afterwards the previous stream waits for it."""
        stream = self.node if axis == "node" else self.network
        outer = torch.accelerator.current_stream(self.groups.device)
        stream.wait_stream(outer)
        with stream:
            yield
        outer.wait_stream(stream)

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: BarrierHeader, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum the tensor in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self.groups.device])
        whole = tensor.view(-1)
        work = Work(key, whole, 0, len(whole), header, plan, self.phases_for(plan, len(whole)), scale, is_last, future)
        self.started[id(work)] = work
        try:
            self.times.collect()
            self.times.note_ready(work)
            self.issue(work)
        except BaseException as error:
            self.failure.record(error, header, "all")
            self.complete_all()
        return future

    def issue(self, work: Work) -> None:
        """Issue all phases that are due, in the order of the node's thread on CPUs."""
        first = self.node if work.phases.before or not work.phases.crosses else self.network
        first.wait_stream(torch.accelerator.current_stream(self.groups.device))
        with first:
            self.runner.scale(work)
            self.runner.run(work, work.phases.before)
            if not work.phases.crosses:
                self.finish(work)
        if work.phases.crosses:
            if first is self.node:
                self.network.wait_stream(self.node)
            self.cross(work)

    def cross(self, work: Work) -> None:
        with self.network:
            self.runner.run(work, work.phases.network)
            if not work.phases.after:
                self.finish(work)
        for due, crossed in self.order.due_after(OnNetwork(work, self.network.record_event()), work.is_last):
            if due.phases.after:
                self.node.wait_event(crossed)
                with self.node:
                    self.runner.run(due, due.phases.after)
                    self.finish(due)

    def finish(self, work: Work) -> None:
        """Complete the future.  Call it on the stream of the last phase, whose event the future records."""
        self.times.note_reduced(work)
        del self.started[id(work)]
        work.finish()

    def complete_all(self) -> None:
        """Complete all futures after an error, so that no caller waits.  `failure` raises at the end of backward."""
        self.order.in_flight.clear()
        while self.started:
            self.started.popitem()[1].finish()

    def forget(self, key: int) -> None:
        """Do nothing: there are no buffers per tensor, unlike on CPUs."""

    def close(self) -> None:
        """Wait for the collectives in flight, which other ranks need.  The watchdog limits the wait."""
        while not (self.failure.has_failed or self.groups.has_aborted) and self.times.unfinished():
            time.sleep(POLL_S)
        self.failure.close()
