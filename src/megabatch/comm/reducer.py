"""All-reduces tensors of the CPU in the background, as plans say, one after another in the order in which they come.

A tensor that crosses the network is cut into parts, and a plan in three: what it does in the node, what crosses the
network, what it does in the node again.  With parts a, b, c, d, ... the two threads do

    in the node    a1 b1 c1 d1       a3 e1    b3 f1    ...
    network           a2 b2 c2 d2 ...

so that the network, the bottleneck, is never idle while a host adds up.  The order in the node is fixed (order.py).
The network's thread starts a part before it moves those in flight on (`ProcessGroup.stages`), so that one travels while
another is summed.

On accelerators there are no threads and no parts, but streams (stream_reducer.py).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from megabatch.comm.barrier import Header
from megabatch.comm.failure import FirstError
from megabatch.comm.groups import Groups
from megabatch.comm.network_worker import NetworkWorker
from megabatch.comm.node_worker import NodeWorker
from megabatch.comm.phases import PhaseRunner
from megabatch.comm.timeline import NoTimeline, Timeline
from megabatch.comm.work import RankPhases, Work, phases_of
from megabatch.planning.pipeline import num_parts
from megabatch.planning.plan import Plan, slices
from megabatch.planning.topology import Axis


class Reducer:
    in_parts = True
    exposed_wait_s = None  # the loop's own clock knows it

    def __init__(self, groups: Groups, failure: FirstError, timeline: Timeline | NoTimeline) -> None:
        self.groups, self.failure, self.timeline = groups, failure, timeline
        self.phases_for = cache(self.cut_phases)
        self.runner = PhaseRunner(groups, failure, timeline)
        self.network = NetworkWorker(self.runner, failure, timeline)
        self.node = NodeWorker(self.runner, self.network, timeline)

    def cut_phases(self, plan: Plan, num_elements: int) -> RankPhases:
        return phases_of(plan, self.groups.topology, self.groups.rank, num_elements)

    @property
    def waited_s(self) -> float:
        """For other ranks and the network, in all.  The straggler waits least; no clocks are compared."""
        return self.runner.waited_s + self.network.waited_s

    def stream_of(self, axis: Axis) -> AbstractContextManager[Any]:
        """There are none."""
        return nullcontext()

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: Header, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """The tensor, summed in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        whole = tensor.view(-1)
        self.timeline.note_ready(key, whole, plan)
        if self.failure.error is not None:  # nothing is exchanged any more
            future.set_result(whole)
            return future
        for begin, end in slices(len(whole), num_parts(plan, whole.nbytes)):
            phases, ends = self.phases_for(plan, end - begin), end == len(whole)
            promise = future if ends else None
            self.node.queue.put(Work(key, whole, begin, end, header, plan, phases, scale, is_last and ends, promise))
        return future

    def forget(self, key: int) -> None:
        """Frees the room in shared memory of a tensor that will not come again."""
        self.runner.buffers.pop(key, None)

    def close(self) -> None:
        self.failure.close()
        self.node.queue.put(None)
        threads = [self.node.thread, self.network.thread]
        for thread in threads:
            thread.join(timeout=0.5)
        self.groups.abort()  # a thread that still waits for other ranks has nobody to wait for it
        for thread in threads:
            thread.join(timeout=10)
        self.runner.buffers = {}
