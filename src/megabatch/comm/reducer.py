"""Sums tensors over ranks in the background, as their plans say, one after another in the order in which they come.

A plan is cut in three: what it does in the node, what crosses the network, what it does in the node again.  With
tensors a, b, c the two threads do

    in the node    a1 b1       a3 c1       b3          c3
    network           a2          b2          c2

so that the network, the bottleneck, is never idle while a host adds up.  The order in the node is fixed (b1 comes
before a3, however fast the network was), because all ranks of a node must take part in the same operation.

On CUDA there are no threads: operations are ordered on streams, and the future of a sum carries its stream's event.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megabatch.comm.barrier import Header, name_bucket
from megabatch.comm.groups import Groups
from megabatch.comm.shared_memory import SharedBuffer
from megabatch.comm.timeline import IN_NODE, NETWORK, Timeline
from megabatch.errors import UserError
from megabatch.planning.plan import Exchange, Phase, Plan, exchanges
from megabatch.planning.topology import Axis

Step = tuple[Phase, Exchange]  # of this rank


class Steps(NamedTuple):
    """This rank's part of a plan, cut where the whole plan is: a rank that sends nothing keeps the order too."""

    before: list[Step]
    network: list[Step]
    after: list[Step]
    crosses: bool  # some rank has something to send


@dataclass
class Work:
    """A tensor to be summed: contiguous and flat, and the same on all ranks but for its values."""

    key: int  # its place among the tensors of a step; negative: none of DDP's buckets
    tensor: torch.Tensor
    header: Header
    plan: Plan
    steps: Steps
    scale: float | None  # of the sum
    is_last: bool  # nothing follows before somebody waits for it
    future: torch.futures.Future[torch.Tensor]
    crossed: threading.Event = field(default_factory=threading.Event)


class Reducer:
    def __init__(self, groups: Groups, explain: Callable[[BaseException, Work, Axis], BaseException]) -> None:
        self.groups = groups
        self.explain = explain  # gives up for this rank, and says what the others say
        self.error: BaseException | None = None
        self.has_failed = False  # the error may still be being explained
        self.timeline: Timeline | None = None
        # Seconds for other ranks and for the network, by bucket: a bucket is with one thread at a time.
        self.waits_s: defaultdict[int, float] = defaultdict(float)
        self.buffers: dict[int, tuple[torch.Tensor, SharedBuffer]] = {}
        self.sizes: dict[tuple[Plan, int], Steps] = {}
        self.compared: dict[tuple[Axis, int], int] = {}  # the layout of each bucket that an engine's members agree on
        self.in_node: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.on_network: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        if groups.device.type == "cpu":
            for loop in (self.work_in_node, self.work_on_network):
                self.threads.append(threading.Thread(target=loop, name=f"megabatch {loop.__name__}", daemon=True))
                self.threads[-1].start()

    def start(
        self, key: int, tensor: torch.Tensor, plan: Plan, header: Header, scale: float | None, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """The tensor, summed in place over all ranks, times `scale`.  All ranks start the same tensors in one order."""
        devices: list[int | str | torch.device] | None = (
            [self.groups.device] if self.groups.device.type == "cuda" else None
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        work = Work(key, tensor.view(-1), header, plan, self.steps_of(plan, tensor.numel()), scale, is_last, future)
        if self.timeline:
            self.timeline.note_ready(name_bucket(key), tensor.nbytes, plan.name)
        if self.threads and self.error is None:
            self.in_node.put(work)
            return future
        # A completed future runs this at once, on a stream of its own that has waited for the tensor.
        future.set_result(work.tensor)
        return future.then(lambda ready: self.run_all(work))

    def run_all(self, work: Work) -> torch.Tensor:
        self.scale(work)
        self.attempt(work, [*work.steps.before, *work.steps.network, *work.steps.after])
        if self.timeline:
            self.timeline.note_summed(name_bucket(work.key))
        return work.tensor

    def steps_of(self, plan: Plan, num_elements: int) -> Steps:
        """This rank's part of the plan for a tensor of this size."""
        if (plan, num_elements) not in self.sizes:
            network = [index for index, phase in enumerate(plan.phases) if phase.axis != "node"]
            begin, end = (network[0], network[-1] + 1) if network else (len(plan.phases), len(plan.phases))
            phases = list(zip(plan.phases, exchanges(plan, self.groups.topology, num_elements), strict=True))
            parts = phases[:begin], phases[begin:end], phases[end:]
            before, crossing, after = (
                [(phase, exchange) for phase, groups in part for exchange in groups if self.takes_part(exchange)]
                for part in parts
            )
            self.sizes[plan, num_elements] = Steps(before, crossing, after, crosses=bool(network))
        return self.sizes[plan, num_elements]

    def takes_part(self, exchange: Exchange) -> bool:
        return self.groups.rank in exchange.members and len(exchange.members) > 1 and exchange.begin < exchange.end

    def work_in_node(self) -> None:
        crossing: Work | None = None
        while work := self.in_node.get():
            self.scale(work)
            self.attempt(work, work.steps.before)
            if not work.steps.crosses:
                self.finish(work)
                continue
            self.on_network.put(work)
            if crossing:
                self.end_crossing(crossing)
            crossing = work if work.steps.after else None
            if crossing and work.is_last:
                self.end_crossing(crossing)
                crossing = None
        self.on_network.put(None)

    def end_crossing(self, work: Work) -> None:
        if self.timeline:
            self.timeline.enter(IN_NODE, f"{name_bucket(work.key)}: waits for the network")
        work.crossed.wait()
        if self.timeline:
            self.timeline.leave(IN_NODE)
        self.attempt(work, work.steps.after)
        self.finish(work)

    def work_on_network(self) -> None:
        while work := self.on_network.get():
            began_s = time.perf_counter()
            self.attempt(work, work.steps.network)
            self.waits_s[work.key] += time.perf_counter() - began_s
            if work.steps.after:
                work.crossed.set()
            else:
                self.finish(work)

    def attempt(self, work: Work, steps: list[Step]) -> None:
        """After a first error nothing is exchanged any more: the others will miss this rank, and say so."""
        try:
            for step in steps:
                if self.has_failed:
                    return
                axis = step[0].axis
                if self.timeline:
                    self.run_recorded(work, step, self.timeline)
                else:
                    self.run(work, step)
        except BaseException as error:
            if not self.has_failed:
                self.has_failed = True
                self.error = self.explain(error, work, axis)

    def finish(self, work: Work) -> None:
        if self.timeline:
            self.timeline.note_summed(name_bucket(work.key))
        work.future.set_result(work.tensor)

    def scale(self, work: Work) -> None:
        """Before it is summed, as DDP does: 16 bits might not hold the sum where they hold the average."""
        if work.scale is not None and not self.has_failed and not self.is_scaled_in_memory(work):
            work.tensor.mul_(work.scale)

    def is_scaled_in_memory(self, work: Work) -> bool:
        """One all-reduce in shared memory scales on its way, before it rounds."""
        return self.groups.memory is not None and len(work.steps.before) == 1 and not work.steps.crosses

    def run_recorded(self, work: Work, step: Step, timeline: Timeline) -> None:
        phase, exchange = step
        lane, waited_s = IN_NODE if phase.axis == "node" else NETWORK, self.waits_s[work.key]
        num_bytes = (exchange.end - exchange.begin) * work.tensor.element_size()
        timeline.enter(lane, f"{name_bucket(work.key)}: {phase}", bytes=num_bytes, plan=work.plan.name)
        self.run(work, step)
        timeline.leave(lane, self.waits_s[work.key] - waited_s)

    def run(self, work: Work, step: Step) -> None:
        phase, exchange = step
        if phase.axis == "node" and self.groups.memory:
            self.run_in_memory(work, phase)
            return
        engine = self.groups.engines[phase.axis]
        # In shared memory every operation compares; here it would cost a round trip, so once for each bucket that
        # DDP makes.
        layout = work.header.layout
        if self.compared.get((phase.axis, work.key)) != layout:
            engine.require_same(layout, work.tensor)
            self.compared[phase.axis, work.key] = layout
        getattr(engine, phase.op)(work.tensor[exchange.begin : exchange.end], phase.wire)

    def run_in_memory(self, work: Work, phase: Phase) -> None:
        memory = self.groups.memory
        assert memory is not None
        waited_s = memory.waited_s
        buffer = self.shared(work)
        match phase.op:
            case "all_reduce":
                memory.all_reduce(buffer, work.header, work.scale if self.is_scaled_in_memory(work) else None)
            case "reduce_scatter":
                memory.reduce_scatter(buffer, work.header)
            case "all_gather":
                memory.all_gather(buffer, work.header)
            case "reduce":
                memory.reduce(buffer, 0, work.header)
            case "broadcast":
                memory.broadcast(buffer, 0, work.header)
        self.waits_s[work.key] += memory.waited_s - waited_s

    def shared(self, work: Work) -> SharedBuffer:
        """The tensor in shared memory, where it stays: DDP's buckets keep their place after the first backward."""
        known, buffer = self.buffers.get(work.key, (None, None))
        if known is None or buffer is None or known.data_ptr() != work.tensor.data_ptr():
            assert self.groups.memory is not None
            buffer = self.groups.memory.share(work.tensor, work.header)
            self.buffers[work.key] = work.tensor, buffer  # kept, so that no other tensor gets its address
        if work.is_last:  # DDP may have had more buckets before
            for key in [key for key in self.buffers if key > work.key]:
                del self.buffers[key]
        return buffer

    def close(self) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.error = UserError("these gradient sums are closed, and a backward follows; close them after the last")
        self.in_node.put(None)
        for thread in self.threads:
            thread.join(timeout=0.5)
        self.groups.abandon()  # a thread that still waits for other ranks has nobody to wait for it
        for thread in self.threads:
            thread.join(timeout=10)
        self.buffers = {}
