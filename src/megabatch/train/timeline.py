"""`comm.timeline`: every rank writes timeline/rank-<r>.json into the run's folder when the run ends, however it ends.

Each rank writes its own: a run that has failed can collect nothing any more, and the traces of a thousand ranks are too
much for one.  A host that does not see the folder leaves its ranks out, and says so.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megabatch.comm.timeline import STEPS, TRAINING, Timeline, common_moment, watch
from megabatch.disk import make_private
from megabatch.runs.files import TIMELINE
from megabatch.runs.records import Record, StepRecord
from megabatch.text import print_line
from megabatch.train.loop import Training


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
