"""`comm.timeline`: every rank writes timeline/rank-<r>.json into the run's folder when the run ends, however it ends.

Each rank writes its own: a run that has failed can collect nothing any more, and the traces of a thousand ranks are too
much for one.  A host that does not see the folder leaves its ranks out, and says so.
"""

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.timeline import STEPS, TRAINING, Timeline
from megabatch.disk import make_private
from megabatch.planning.topology import Topology
from megabatch.ranks.world import World
from megabatch.runs.files import TIMELINE
from megabatch.runs.records import Record, StepRecord
from megabatch.text import print_line
from megabatch.torch_api import queue_callback
from megabatch.train.parts import Training

ROUNDS = 9  # of agreeing on a moment: one alone may be milliseconds off, where a rank waits for a core


@contextmanager
def recorded(
    records: Iterator[Record], first_step: int, training: Training, folder: Path | None
) -> Iterator[Iterator[Record]]:
    """The same records, while what happens in between goes to the timeline.  Rank 0 knows the run's folder."""
    if folder:
        shutil.rmtree(folder / TIMELINE, ignore_errors=True)  # of the attempt before; of a link, nothing
    world, topology, timeline = training.world, training.gradients.topology, training.gradients.timeline
    assert isinstance(timeline, Timeline)
    run_folder = Path(world.broadcast_text(str(folder.resolve() if folder else "")))
    timeline.restart(common_moment(world, topology), first_step + 1)
    watch(training.model, timeline)
    try:
        yield marked(records, timeline)
    finally:
        own_host = topology.members("node", world.rank)
        problem = write(timeline, run_folder)
        if problem and world.rank == own_host[0]:
            ranks = f"ranks {own_host[0]} to {own_host[-1]}" if len(own_host) > 1 else f"rank {own_host[0]}"
            print_line(f"megabatch: no timeline of {ranks}: {problem}", to_stderr=True)


def marked(records: Iterator[Record], timeline: Timeline) -> Iterator[Record]:
    timeline.begin_step(timeline.step)
    for record in records:
        timeline.leave(STEPS)
        timeline.enter(TRAINING, "records")
        yield record
        if isinstance(record, StepRecord) and record.evaluated:
            timeline.enter(TRAINING, "evaluation")
        else:
            timeline.begin_step(record.step + 1)
    timeline.under_way.clear()  # a step that is not taken


def write(timeline: Timeline, run_folder: Path) -> str | None:
    """Returns why it could not."""
    if not run_folder.is_dir():
        return f"{run_folder} is not seen here; a run.dir on a disk that all hosts share would be"
    try:
        make_private(run_folder / TIMELINE)
        timeline.write(run_folder / TIMELINE / f"rank-{timeline.rank}.json")
    except OSError as error:
        return f"{run_folder / TIMELINE} cannot be written to ({error.strerror})"
    return None


def common_moment(world: World, topology: Topology) -> float:
    """A moment that all ranks share, on this rank's clock.

    Ranks come out of a collective at about the same time, and do so a few times; the differences to rank 0's clock have
    a median.  Ranks of a host have one clock, and take the difference of the first of them.
    """
    came_out_s = []
    for _ in range(ROUNDS):
        world.barrier()
        came_out_s.append(time.perf_counter())
    all_came_out_s = world.gather(torch.tensor(came_out_s, dtype=torch.float64, device=world.device))
    first_of_host = topology.members("node", world.rank)[0]
    first, own_host = all_came_out_s[0].tolist(), all_came_out_s[first_of_host].tolist()
    ahead_s = statistics.median(own_s - first_s for own_s, first_s in zip(own_host, first, strict=True))
    return float(first[-1] + ahead_s)


def watch(model: DistributedDataParallel, timeline: Timeline) -> None:
    """Lets the model itself say when forward and backward begin and end, so that the training loop need not."""

    def begin_forward(*_: Any) -> None:
        timeline.enter(TRAINING, "forward")

    def end_forward(_: Any, __: Any, logits: torch.Tensor) -> None:
        logits.register_hook(begin_backward)

    def begin_backward(_: torch.Tensor) -> None:
        timeline.enter(TRAINING, "backward")
        queue_callback(end_backward)

    def end_backward() -> None:
        if not model.require_backward_grad_sync:  # another microbatch follows
            timeline.enter(TRAINING, "input")
            return
        timeline.enter(TRAINING, "waiting for all-reduce")
        # Behind the callbacks of our hook and of DDP, which wait.
        queue_callback(lambda: timeline.enter(TRAINING, "update"))

    model.register_forward_pre_hook(begin_forward)
    model.register_forward_hook(end_forward)
