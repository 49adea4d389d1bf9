"""The thread that works inside the node: what a plan does there before it crosses the network, and after."""

import queue
import threading
from collections import deque

from megabatch.comm.network_worker import NetworkWorker
from megabatch.comm.phases import PhaseRunner
from megabatch.comm.timeline import IN_NODE, NoTimeline, Timeline
from megabatch.comm.work import Work

DEPTH = 3  # parts that are on the network, or wait for it, when the thread turns to the oldest of them


class NodeWorker:
    def __init__(self, runner: PhaseRunner, network: NetworkWorker, timeline: Timeline | NoTimeline) -> None:
        self.runner, self.network, self.timeline = runner, network, timeline
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: it ends
        self.thread = threading.Thread(target=self.run, name="megabatch node", daemon=True)
        self.thread.start()

    def run(self) -> None:
        in_flight: deque[Work] = deque()
        while work := self.queue.get():
            self.runner.scale(work)
            self.runner.run(work, work.phases.before)
            if not work.phases.crosses:
                self.finish(work)
                continue
            self.network.queue.put(work)
            in_flight.append(work)
            while len(in_flight) > (0 if work.is_last else DEPTH):
                self.run_after(in_flight.popleft())
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
