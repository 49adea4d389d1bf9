"""The thread that works inside the node: what a plan does there before it crosses the network, and after."""

import queue
import threading

from megabatch.comm.network_worker import NetworkWorker
from megabatch.comm.order import NodeOrder
from megabatch.comm.phases import PhaseRunner
from megabatch.comm.timeline import IN_NODE, NoTimeline, Timeline
from megabatch.comm.work import Work


class NodeWorker:
    def __init__(self, runner: PhaseRunner, network: NetworkWorker, timeline: Timeline | NoTimeline) -> None:
        self.runner, self.network, self.timeline = runner, network, timeline
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: it ends
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
