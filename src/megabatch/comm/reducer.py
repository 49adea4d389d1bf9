"""All-reduces tensors in the background, as their plans say, one after another in the order in which they come.

A tensor that crosses the network is cut into parts, and a plan in three: what it does in the node, what crosses the
network, what it does in the node again.  With parts a, b, c, d, ... the two threads do

    in the node    a1 b1 c1 d1       a3 e1    b3 f1    ...
    network           a2 b2 c2 d2 ...

so that the network, the bottleneck, is never idle while a host adds up.  The order in the node is fixed (DEPTH parts go
ahead, however fast the network was), because all ranks of a node must take part in the same operation.  The network's
thread starts a part before it moves those in flight on (`ProcessGroup.stages`), so that one travels while another is
summed.

On CUDA there are no threads and no parts: operations are ordered on streams, and the future of an all-reduce carries
its stream's event.
"""

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


class Reducer:
    def __init__(self, groups: Groups, failure: FirstError, timeline: Timeline | NoTimeline) -> None:
        self.groups, self.failure, self.timeline = groups, failure, timeline
        self.rank_phases: dict[tuple[Plan, int], RankPhases] = {}  # by the size of a tensor
        self.runner = PhaseRunner(groups, failure, timeline)
        self.network, self.node = None, None
        if groups.device.type == "cpu":
            self.network = NetworkWorker(self.runner, failure, timeline)
            self.node = NodeWorker(self.runner, self.network, timeline)

    @property
    def waited_s(self) -> float:
        """For other ranks and the network, in all.  The straggler waits least; no clocks are compared."""
        return self.runner.waited_s + (self.network.waited_s if self.network else 0.0)

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: Header, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """The tensor, summed in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
        devices: list[int | str | torch.device] | None = (
            [self.groups.device] if self.groups.device.type == "cuda" else None
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        whole = tensor.view(-1)
        self.timeline.note_ready(key, whole, plan)
        if self.node and self.failure.error is None:
            for begin, end in slices(len(whole), num_parts(plan, whole.nbytes)):
                phases, ends = self.phases_for(plan, end - begin), end == len(whole)
                promise = future if ends else None
                self.node.queue.put(
                    Work(key, whole, begin, end, header, plan, phases, scale, is_last and ends, promise)
                )
            return future
        work = Work(key, whole, 0, len(whole), header, plan, self.phases_for(plan, len(whole)), scale, is_last, None)
        # A completed future runs this at once, on a stream of its own that has waited for the tensor.
        future.set_result(whole)
        return future.then(lambda ready: self.run_all(work))

    def run_all(self, work: Work) -> torch.Tensor:
        self.runner.scale(work)
        self.runner.run(work, [*work.phases.before, *work.phases.network, *work.phases.after])
        self.timeline.note_reduced(work)
        return work.whole

    def phases_for(self, plan: Plan, num_elements: int) -> RankPhases:
        if (plan, num_elements) not in self.rank_phases:
            self.rank_phases[plan, num_elements] = phases_of(plan, self.groups.topology, self.groups.rank, num_elements)
        return self.rank_phases[plan, num_elements]

    def forget(self, key: int) -> None:
        """Frees the room in shared memory of a tensor that will not come again."""
        self.runner.buffers.pop(key, None)

    def close(self) -> None:
        self.failure.close()
        if self.node and self.network:
            self.node.queue.put(None)
            threads = [self.node.thread, self.network.thread]
            for thread in threads:
                thread.join(timeout=0.5)
            self.groups.abort()  # a thread that still waits for other ranks has nobody to wait for it
            for thread in threads:
                thread.join(timeout=10)
        self.runner.buffers = {}
