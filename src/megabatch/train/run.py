"""A whole run on one rank: join, assemble, train, and on rank 0 write and show every record."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from megabatch.comm.world import Place, World, choose_device, connect
from megabatch.config import RunConfig
from megabatch.data.sources import load_data_set
from megabatch.train.assemble import assemble
from megabatch.train.folder import RunFolder
from megabatch.train.records import Record, Status, Tally
from megabatch.train.screen import Screen
from megabatch.train.trainer import Training, train


class StopSignal:
    """Remembers that Ctrl-C or SIGTERM came; the trainer asks once a step.  A second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def received(self) -> bool:
        return self.number is not None


def run(config: RunConfig, recipe: str, place: Place) -> int:
    """Runs one rank to its end; returns the exit code: 0, or 128 + the signal that stopped it."""
    stop = StopSignal()
    with connect(place, choose_device(config.run.device)) as world:
        training = assemble(config, load_data_set(config.data), world, stop.received)
        # Only now is anything written: what can be wrong with a recipe has been found by here.
        observer = observe(config, recipe, training, world) if world.rank == 0 else nullcontext(ignore)
        steps = 0
        with observer as see:
            for record in train(training):
                see(record)
                steps = record.step
    finished = steps == training.plan.num_steps
    return 0 if finished else 128 + (stop.number or signal.SIGTERM)


def ignore(record: Record) -> None:
    """What the other ranks do with their records: all ranks have the same."""


@contextmanager
def observe(config: RunConfig, recipe: str, training: Training, world: World) -> Iterator[Callable[[Record], None]]:
    """Rank 0's eyes: every record goes to the folder, the screen and the summary."""
    tally = Tally(training.plan.global_batch, config.train.target_top1)
    with RunFolder.create(config, recipe) as folder, Screen(config, recipe, training, world, folder.path) as screen:
        started_s = time.perf_counter()

        def see(record: Record) -> None:
            folder.write(record)
            tally.add(record, wall_s=time.perf_counter() - started_s)
            screen.show(record)

        try:
            yield see
        except BaseException:
            folder.finish(tally.summary("failed", time.perf_counter() - started_s))
            raise
        status: Status = "finished" if tally.steps == training.plan.num_steps else "stopped"
        summary = tally.summary(status, time.perf_counter() - started_s)
        folder.finish(summary)
        screen.finish(summary)
