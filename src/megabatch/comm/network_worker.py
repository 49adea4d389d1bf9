"""The thread that carries parts between nodes, several at a time: one travels while another is summed."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megabatch.comm.failure import FirstError
from megabatch.comm.phases import PhaseRunner
from megabatch.comm.process_group import ProcessGroup
from megabatch.comm.timeline import NETWORK, NoTimeline, Timeline
from megabatch.comm.work import Work


@dataclass
class InFlight:
    """A part on the network: its stages, and what the current one waits for."""

    work: Work
    stages: Iterator[Callable[[], None]]
    wait: Callable[[], None] = lambda: None
    has_ended: bool = False


class NetworkWorker:
    def __init__(self, runner: PhaseRunner, failure: FirstError, timeline: Timeline | NoTimeline) -> None:
        self.runner, self.failure, self.timeline = runner, failure, timeline
        self.waited_s = 0.0  # for the network, in all
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: it ends
        self.thread = threading.Thread(target=self.run, name="megabatch network", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Starts what comes, and then moves all that is in flight one stage on: the oldest alone, if nothing came."""
        in_flight: list[InFlight] = []
        while True:
            if in_flight and self.queue.empty():
                moving = in_flight[:1]
            elif work := self.queue.get():
                if not all(self.runner.is_compared(work, phase.axis) for phase, _ in work.phases.network):
                    # To compare blocks, and then nobody may wait for what is in flight.
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
        """Waits for what its stage needs, and begins the next one."""
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
        """What a part does on the network; it wants each wait called that it yields."""
        for phase, transfer in work.phases.network:
            group = self.runner.process_group_for(work, phase.axis)
            assert isinstance(group, ProcessGroup)
            tensor = work.tensor[transfer.begin : transfer.end]
            if phase.engine:
                yield from group.backend_stages(tensor, phase.dtype)
            elif phase.op == "all_reduce":
                yield from group.stages(tensor, phase.dtype)
            else:
                getattr(group, phase.op)(tensor, phase.dtype)
