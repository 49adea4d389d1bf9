"""Sums tensors over ranks in the background, as their plans say, one after another in the order in which they come.

A tensor that crosses the network is cut into parts, and a plan in three: what it does in the node, what crosses the
network, what it does in the node again.  With parts a, b, c, d, ... the two threads do

    in the node    a1 b1 c1 d1       a3 e1    b3 f1    ...
    network           a2 b2 c2 d2 ...

so that the network, the bottleneck, is never idle while a host adds up.  The order in the node is fixed (LEAD parts go
ahead, however fast the network was), because all ranks of a node must take part in the same operation.  The network's
thread starts a part before it goes on with those on their way (`Engine.stages`), so that one travels while another is
summed.

On CUDA there are no threads and no parts: operations are ordered on streams, and the future of a sum carries its
stream's event.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megabatch.comm.barrier import Header, name_bucket
from megabatch.comm.engine import Engine
from megabatch.comm.groups import Groups
from megabatch.comm.shared_memory import SharedBuffer
from megabatch.comm.timeline import IN_NODE, NETWORK, Timeline
from megabatch.errors import UserError
from megabatch.planning.pipeline import num_parts
from megabatch.planning.plan import Exchange, Phase, Plan, exchanges, slices
from megabatch.planning.topology import Axis

LEAD = 3  # parts that are on the network, or wait for it, when the node's thread turns to the oldest of them

Step = tuple[Phase, Exchange]  # of this rank


class Steps(NamedTuple):
    """This rank's part of a plan, cut where the whole plan is: a rank that sends nothing keeps the order too."""

    before: list[Step]
    network: list[Step]
    after: list[Step]
    crosses: bool  # some rank has something to send


@dataclass
class Work:
    """A tensor to be summed, or a part of it: contiguous and flat, and the same on all ranks but for its values."""

    key: int  # its place among the tensors of a step; negative: none of DDP's buckets
    whole: torch.Tensor
    begin: int  # this part of the whole
    end: int
    header: Header
    plan: Plan
    steps: Steps
    scale: float | None  # of the sum
    is_last: bool  # nothing follows before somebody waits for it
    future: torch.futures.Future[torch.Tensor] | None  # of the whole, with its last part
    crossed: threading.Event = field(default_factory=threading.Event)

    @property
    def tensor(self) -> torch.Tensor:
        return self.whole[self.begin : self.end]


@dataclass
class Crossing:
    """A part on the network: its stages, and what the current one waits for."""

    work: Work
    stages: Iterator[Callable[[], None]]
    wait: Callable[[], None] = lambda: None
    has_ended: bool = False


class Reducer:
    def __init__(self, groups: Groups, explain: Callable[[BaseException, Work, Axis], BaseException]) -> None:
        self.groups = groups
        self.explain = explain  # gives up for this rank, and says what the others say
        self.error: BaseException | None = None
        self.has_failed = False  # the error may still be being explained
        self.timeline: Timeline | None = None
        # Seconds for other ranks and for the network, by thread and bucket.
        self.waits_s: defaultdict[tuple[str, int], float] = defaultdict(float)
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
        whole = tensor.view(-1)
        if self.timeline:
            self.timeline.note_ready(name_bucket(key), whole.nbytes, plan.name)
        if self.threads and self.error is None:
            for begin, end in slices(len(whole), num_parts(plan, whole.nbytes)):
                steps, ends = self.steps_of(plan, end - begin), end == len(whole)
                promise = future if ends else None
                self.in_node.put(Work(key, whole, begin, end, header, plan, steps, scale, is_last and ends, promise))
            return future
        work = Work(key, whole, 0, len(whole), header, plan, self.steps_of(plan, len(whole)), scale, is_last, None)
        # A completed future runs this at once, on a stream of its own that has waited for the tensor.
        future.set_result(whole)
        return future.then(lambda ready: self.run_all(work))

    def run_all(self, work: Work) -> torch.Tensor:
        self.scale(work)
        self.attempt(work, [*work.steps.before, *work.steps.network, *work.steps.after])
        if self.timeline:
            self.timeline.note_summed(name_bucket(work.key))
        return work.whole

    def steps_of(self, plan: Plan, num_elements: int) -> Steps:
        """This rank's part of the plan for a tensor of this size."""
        if (plan, num_elements) not in self.sizes:
            network = plan.network
            phases = list(zip(plan.phases, exchanges(plan, self.groups.topology, num_elements), strict=True))
            parts = phases[: network.start], phases[network], phases[network.stop :]
            before, crossing, after = (
                [(phase, exchange) for phase, groups in part for exchange in groups if self.takes_part(exchange)]
                for part in parts
            )
            self.sizes[plan, num_elements] = Steps(before, crossing, after, plan.crosses)
        return self.sizes[plan, num_elements]

    def takes_part(self, exchange: Exchange) -> bool:
        return self.groups.rank in exchange.members and len(exchange.members) > 1 and exchange.begin < exchange.end

    def work_in_node(self) -> None:
        crossing: deque[Work] = deque()
        while work := self.in_node.get():
            self.scale(work)
            self.attempt(work, work.steps.before)
            if not work.steps.crosses:
                self.finish(work)
                continue
            self.on_network.put(work)
            crossing.append(work)
            while len(crossing) > (0 if work.is_last else LEAD):
                self.end_crossing(crossing.popleft())
        self.on_network.put(None)

    def end_crossing(self, work: Work) -> None:
        if not work.steps.after:  # the network's thread finishes it
            return
        if self.timeline:
            self.timeline.enter(IN_NODE, f"{name_bucket(work.key)}: waits for the network")
        work.crossed.wait()
        if self.timeline:
            self.timeline.leave(IN_NODE)
        self.attempt(work, work.steps.after)
        self.finish(work)

    def work_on_network(self) -> None:
        """Starts what comes, and then takes all that is on its way one stage on: the oldest alone, if nothing came."""
        under_way: list[Crossing] = []
        while True:
            if under_way and self.on_network.empty():
                moving = under_way[:1]
            elif work := self.on_network.get():
                if not all(self.is_compared(work, phase.axis) for phase, _ in work.steps.network):
                    # To compare blocks, and then nobody may wait for what is on its way.
                    self.end_all(under_way)
                moving = [Crossing(work, self.stages(work)), *under_way]
                under_way.append(moving[0])
            else:
                break
            for crossing in moving:
                self.go_on(crossing)
            under_way = [crossing for crossing in under_way if not crossing.has_ended]
        self.end_all(under_way)

    def end_all(self, under_way: list[Crossing]) -> None:
        for crossing in under_way:
            while not crossing.has_ended:
                self.go_on(crossing)
        under_way.clear()

    def go_on(self, crossing: Crossing) -> None:
        """Waits for what its stage needs, and begins the next one."""
        work, began_s = crossing.work, time.perf_counter()
        if self.timeline and work.steps.network:
            self.enter_phase(self.timeline, work, work.steps.network[0])
        try:
            if not self.has_failed:
                crossing.wait()
                following = next(crossing.stages, None)
                crossing.has_ended = following is None
                crossing.wait = following or crossing.wait
        except BaseException as error:
            self.fail(error, work, work.steps.network[0][0].axis)
        crossing.has_ended |= self.has_failed
        if self.timeline:
            self.timeline.leave(NETWORK)
        self.waits_s[NETWORK, work.key] += time.perf_counter() - began_s
        if crossing.has_ended:
            self.end_on_network(work)

    def end_on_network(self, work: Work) -> None:
        if work.steps.after:
            work.crossed.set()
        else:
            self.finish(work)

    def stages(self, work: Work) -> Iterator[Callable[[], None]]:
        """What a part does on the network; it wants each wait called that it yields."""
        for phase, exchange in work.steps.network:
            engine = self.engine_for(work, phase)
            tensor = work.tensor[exchange.begin : exchange.end]
            if phase.op == "all_reduce":
                yield from engine.stages(tensor, phase.wire)
            else:
                getattr(engine, phase.op)(tensor, phase.wire)

    def attempt(self, work: Work, steps: list[Step]) -> None:
        """After a first error nothing is exchanged any more: the others will miss this rank, and say so."""
        for step in steps:
            if self.has_failed:
                return
            try:
                if self.timeline:
                    self.run_recorded(work, step, self.timeline)
                else:
                    self.run(work, step)
            except BaseException as error:
                self.fail(error, work, step[0].axis)

    def fail(self, error: BaseException, work: Work, axis: Axis) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.error = self.explain(error, work, axis)

    def finish(self, work: Work) -> None:
        if work.future is not None:
            if self.timeline:
                self.timeline.note_summed(name_bucket(work.key))
            work.future.set_result(work.whole)

    def scale(self, work: Work) -> None:
        """Before it is summed, as DDP does: 16 bits might not hold the sum where they hold the average."""
        if work.scale is not None and not self.has_failed and not self.is_scaled_in_memory(work):
            work.tensor.mul_(work.scale)

    def is_scaled_in_memory(self, work: Work) -> bool:
        """One all-reduce in shared memory scales on its way, before it rounds."""
        return self.groups.memory is not None and len(work.steps.before) == 1 and not work.steps.crosses

    def run_recorded(self, work: Work, step: Step, timeline: Timeline) -> None:
        waited_s = self.waits_s[IN_NODE, work.key]
        self.enter_phase(timeline, work, step)
        self.run(work, step)
        timeline.leave(lane_of(step), self.waits_s[IN_NODE, work.key] - waited_s)

    def enter_phase(self, timeline: Timeline, work: Work, step: Step) -> None:
        phase, exchange = step
        num_bytes = (exchange.end - exchange.begin) * work.whole.element_size()
        timeline.enter(lane_of(step), f"{name_bucket(work.key)}: {phase}", bytes=num_bytes, plan=work.plan.name)

    def run(self, work: Work, step: Step) -> None:
        phase, exchange = step
        if phase.axis == "node" and self.groups.memory:
            self.run_in_memory(work, phase)
            return
        engine = self.engine_for(work, phase)
        getattr(engine, phase.op)(work.tensor[exchange.begin : exchange.end], phase.wire)

    def engine_for(self, work: Work, phase: Phase) -> Engine:
        """The engine, once its members agree on the tensor.

        In shared memory every operation compares; here it would cost a round trip, so once for each bucket that DDP
        makes.
        """
        engine = self.groups.engines[phase.axis]
        if not self.is_compared(work, phase.axis):
            engine.require_same(work.header.layout, work.whole)
            self.compared[phase.axis, work.key] = work.header.layout
        return engine

    def is_compared(self, work: Work, axis: Axis) -> bool:
        return self.compared.get((axis, work.key)) == work.header.layout

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
        self.waits_s[IN_NODE, work.key] += memory.waited_s - waited_s

    def shared(self, work: Work) -> SharedBuffer:
        """The part in shared memory, where the whole stays: DDP's buckets keep their place after the first backward."""
        known, buffer = self.buffers.get(work.key, (None, None))
        if known is None or buffer is None or known.data_ptr() != work.whole.data_ptr():
            assert self.groups.memory is not None
            buffer = self.groups.memory.share(work.whole, work.header)
            self.buffers[work.key] = work.whole, buffer  # kept, so that no other tensor gets its address
        if work.is_last and work.key >= 0:  # DDP may have had more buckets before
            for key in [key for key in self.buffers if key > work.key]:
                del self.buffers[key]
        return buffer.part(work.begin, work.end)

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


def lane_of(step: Step) -> str:
    return IN_NODE if step[0].axis == "node" else NETWORK
