"""All-reduces tensors of an accelerator, ordered on two streams of its own; nothing here waits on the host.

A bucket's work in its node is put on one stream, its way over the network on the other, in the order of the CPU's two
threads (reducer.py, order.py); but a bucket is not cut into parts, since one launch costs what it costs:

    in the node    a1 b1 c1 d1 a3 e1 b3 f1 ...        each waits, on its stream, for what it needs:
    network        a2 b2 c2 d2 e2 ...                 a1 for backward, a2 for a1, a3 for a2

A process group is used on one stream alone, since a communicator is one queue: were a3 put before b1, b1 would wait
for the network.  All ranks issue the same collectives in the same order, whatever their devices are at.

The future of an all-reduce is completed when its last phase is issued; whoever waits for it makes its own stream wait.
Temporaries belong to the process groups, on the stream of each.  A tensor needs no `record_stream`: it belongs to
whoever waits for its future, on the stream that it was made on, before letting go of it (DDP does, and StepMetrics).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.cpu.barrier import Header
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import Groups
from megabatch.comm.order import NodeOrder
from megabatch.comm.phases import PhaseRunner
from megabatch.comm.work import RankPhases, Work, phases_of
from megabatch.planning.plan import Plan, padded_slice_of
from megabatch.planning.topology import Axis

POLL_S = 1e-3
HIGH = -1  # a collective gets its few blocks as soon as any of backward's end


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
        self.started: dict[int, Work] = {}  # what is not issued to its end, by id
        self.phases_for = cache(self.cut_phases)

    def cut_phases(self, plan: Plan, num_elements: int) -> RankPhases:
        return phases_of(plan, self.groups.topology, self.groups.rank, num_elements, padded_slice_of)

    @property
    def waited_s(self) -> float:
        """In collectives, of those that have ended on the device.  The straggler waits least."""
        return self.times.waited_s

    @property
    def exposed_wait_s(self) -> float | None:
        return self.times.exposed_wait_s

    @contextmanager
    def stream_of(self, axis: Axis) -> Iterator[None]:
        """Inside is the stream on which the process group of this axis works; the current one waits for it after."""
        stream = self.node if axis == "node" else self.network
        outer = torch.accelerator.current_stream(self.groups.device)
        stream.wait_stream(outer)
        with stream:
            yield
        outer.wait_stream(stream)

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: Header, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """The tensor, summed in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
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
        """In the order of the node's thread on CPUs."""
        ends_step = work.is_last and work.key >= 0
        backward_ended = self.times.event() if ends_step else None
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
        if backward_ended is not None:
            self.network.wait_stream(self.node)
            with self.network:
                self.times.note_step_end(backward_ended)

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
        """On the stream of its last phase: the future takes that stream's event."""
        self.times.note_reduced(work)
        del self.started[id(work)]
        work.finish()

    def complete_all(self) -> None:
        """After an error nobody must wait for a future; `failure` raises at the end of backward."""
        self.order.in_flight.clear()
        while self.started:
            self.started.popitem()[1].finish()

    def forget(self, key: int) -> None:
        """A tensor will not come again."""

    def close(self) -> None:
        """What is on the way ends first: other ranks need it.  The watchdog sees to it that this ends."""
        while not (self.failure.has_failed or self.groups.has_aborted) and self.times.unfinished():
            time.sleep(POLL_S)
        self.failure.close()
