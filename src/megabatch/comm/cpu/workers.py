"""The threads that all-reduce CPU tensors: one for the network, one for the node."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import Groups
from megabatch.comm.phases import NodeOrder, PhaseRunner
from megabatch.comm.work import RankPhases, Work, phases_of
from megabatch.planning.pipeline import num_parts
from megabatch.planning.plan import Plan, slices
from megabatch.planning.topology import Axis
from megabatch.telemetry.timeline import IN_NODE, NETWORK, Timeline


@dataclass
class InFlight:
    """A part on the network, with its stages and the wait of the current one."""

    work: Work
    stages: Iterator[Callable[[], None]]
    wait: Callable[[], None] = lambda: None
    has_ended: bool = False


class NetworkWorker:
    """The thread that exchanges parts between nodes, several at a time: one is transferred while another is summed."""

    def __init__(self, runner: PhaseRunner, failure: FirstError, timeline: Timeline) -> None:
        self.runner, self.failure, self.timeline = runner, failure, timeline
        self.waited_s = 0.0  # total, for the network
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None ends the thread
        self.thread = threading.Thread(target=self.run, name="megabatch network", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Start each queued part and advance all in flight by one stage.  If the queue is empty, advance the oldest."""
        in_flight: list[InFlight] = []
        while True:
            if in_flight and self.queue.empty():
                moving = in_flight[:1]
            elif work := self.queue.get():
                if not all(self.runner.is_compared(work, phase.axis) for phase, _ in work.phases.network):
                    # The comparison of layouts blocks, so complete the parts in flight, which other ranks may wait for.
                    self.end_all(in_flight)
                moving = [InFlight(work, self.stages(work)), *in_flight]
                in_flight.append(moving[0])
            else:
                break
            for part in moving:
                self.advance(part)
            in_flight = [part for part in in_flight if not part.has_ended]
        self.end_all(in_flight)

    def end_all(self, in_flight: list[InFlight]) -> None:
        for part in in_flight:
            while not part.has_ended:
                self.advance(part)
        in_flight.clear()

    def advance(self, part: InFlight) -> None:
        """Wait for the current stage, and start the next one."""
        work, began_s = part.work, time.perf_counter()
        if work.phases.network:
            self.timeline.enter_phase(work, *work.phases.network[0])
        try:
            if not self.failure.has_failed:
                part.wait()
                following = next(part.stages, None)
                part.has_ended = following is None
                part.wait = following or part.wait
        except BaseException as error:
            self.failure.record(error, work.header, work.phases.network[0][0].axis)
        part.has_ended |= self.failure.has_failed
        self.timeline.leave(NETWORK)
        self.waited_s += time.perf_counter() - began_s
        if part.has_ended:
            self.end(work)

    def end(self, work: Work) -> None:
        if work.phases.after:
            work.crossed.set()
        else:
            self.timeline.note_reduced(work)
            work.finish()

    def stages(self, work: Work) -> Iterator[Callable[[], None]]:
        """Run the network phases of a part.  The caller must call each wait that this yields."""
        for phase, transfer in work.phases.network:
            group = self.runner.process_group_for(work, phase.axis)
            assert isinstance(group, ProcessGroup)
            tensor = work.tensor[transfer.begin : transfer.end]
            if phase.backend:
                yield from group.backend_stages(tensor, phase.dtype)
            elif phase.op == "all_reduce":
                yield from group.stages(tensor, phase.dtype)
            else:
                getattr(group, phase.op)(tensor, phase.dtype)


class NodeWorker:
    """The thread that runs the phases within the node, before and after those on the network."""

    def __init__(self, runner: PhaseRunner, network: NetworkWorker, timeline: Timeline) -> None:
        self.runner, self.network, self.timeline = runner, network, timeline
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None ends the thread
        self.thread = threading.Thread(target=self.run, name="megabatch node", daemon=True)
        self.thread.start()

    def run(self) -> None:
        order: NodeOrder[Work] = NodeOrder()
        while work := self.queue.get():
            self.runner.scale(work)
            self.runner.run(work, work.phases.before)
            if not work.phases.crosses:
                self.finish(work)
                continue
            self.network.queue.put(work)
            for due in order.due_after(work, work.is_last):
                self.run_after(due)
        self.network.queue.put(None)

    def run_after(self, work: Work) -> None:
        if not work.phases.after:  # the network's thread finishes it
            return
        self.timeline.enter_wait(work)
        work.crossed.wait()
        self.timeline.leave(IN_NODE)
        self.runner.run(work, work.phases.after)
        self.finish(work)

    def finish(self, work: Work) -> None:
        self.timeline.note_reduced(work)
        work.finish()


class Reducer:
    """All-reduces CPU tensors in the background, in the order in which they are started.

    A tensor that crosses the network is split into parts.  A plan has three stages: phases within the node, phases on
    the network, and phases within the node again.  With parts a, b, c, d, ... the two threads run

        in the node    a1 b1 c1 d1       a3 e1    b3 f1    ...
        network           a2 b2 c2 d2 ...

    so the network, which is the bottleneck, is not idle while a node sums.  The order within the node is fixed
    (phases.py).  The network's thread starts a part before it advances those in flight (`ProcessGroup.stages`), so one
    part is transferred while another is summed.

    Accelerators use streams instead of threads and parts (accelerator/streams.py).
    """

    in_parts = True

    def __init__(self, groups: Groups, failure: FirstError, timeline: Timeline) -> None:
        self.groups, self.failure, self.timeline = groups, failure, timeline
        self.phases_for = cache(self.cut_phases)
        self.runner = PhaseRunner(groups, failure, timeline)
        self.network = NetworkWorker(self.runner, failure, timeline)
        self.node = NodeWorker(self.runner, self.network, timeline)

    def cut_phases(self, plan: Plan, num_elements: int) -> RankPhases:
        return phases_of(plan, self.groups.topology, self.groups.rank, num_elements)

    @property
    def waited_s(self) -> float:
        """Total time waiting for other ranks and the network.  The straggler waits least; no clocks are compared."""
        return self.runner.waited_s + self.network.waited_s

    def stream_of(self, axis: Axis) -> AbstractContextManager[Any]:
        """Return an empty context: CPUs have no streams."""
        return nullcontext()

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: BarrierHeader, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum the tensor in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        whole = tensor.view(-1)
        self.timeline.note_ready(key, whole, plan)
        if self.failure.error is not None:  # after an error nothing is exchanged
            future.set_result(whole)
            return future
        for begin, end in slices(len(whole), num_parts(plan, whole.nbytes)):
            phases, ends = self.phases_for(plan, end - begin), end == len(whole)
            promise = future if ends else None
            self.node.queue.put(Work(key, whole, begin, end, header, plan, phases, scale, is_last and ends, promise))
        return future

    def forget(self, key: int) -> None:
        """Free the shared memory of a tensor that will not be all-reduced again."""
        self.runner.buffers.pop(key, None)

    def close(self) -> None:
        self.failure.close()
        self.node.queue.put(None)
        threads = [self.node.thread, self.network.thread]
        for thread in threads:
            thread.join(timeout=0.5)
        self.groups.abort()  # ends a thread that still waits for other ranks
        for thread in threads:
            thread.join(timeout=10)
        self.runner.buffers = {}
