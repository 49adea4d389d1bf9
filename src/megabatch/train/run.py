"""A whole run on one rank: join, assemble, begin or resume, train, and on rank 0 record everything."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import msgspec
import torch
from msgspec import Struct

from megabatch.config.schema import RunConfig
from megabatch.data.sources import load_data_set
from megabatch.errors import Diverged, UserError
from megabatch.planning.batch import StepPlan
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import Place, fair_threads, host_identity, usable_cores
from megabatch.ranks.launch import FAILURE_TIMEOUT_S, was_launched
from megabatch.ranks.store import FOLDER, MISTAKE, Notices
from megabatch.ranks.world import World, choose_device, connect
from megabatch.runs.folder import PLAN, RunFolder
from megabatch.runs.records import Record, Status, StepRecord, Summary, Tally
from megabatch.train.assemble import assemble
from megabatch.train.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    describe_arithmetic,
    read_description,
    read_state,
    restore_training_state,
    save_weights,
)
from megabatch.train.loop import Training, train
from megabatch.train.resume import alone_in_runs, choose_start, newest_whole, stored_tuning
from megabatch.train.screen import Screen
from megabatch.train.tensorboard import EventFile
from megabatch.train.timeline import recorded


class StopSignal:
    """Remembers that Ctrl-C or SIGTERM came; the trainer asks once a step.  A second one ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows nobody to listen
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, listener in self.before.items():
            signal.signal(number, listener)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and not was_launched():
            raise KeyboardInterrupt  # our launcher ends a rank itself
        if was_launched() and self.number != signal.SIGINT:
            # From our launcher SIGINT means to stop, in good time; SIGTERM that another rank has failed, and then a
            # collective may never return.
            signal.alarm(FAILURE_TIMEOUT_S if number == signal.SIGTERM else 0)
        self.number = number

    def received(self) -> bool:
        return self.number is not None

    def exit_code(self) -> int:
        """Where only another rank got the signal, this one does not know which it was."""
        return 128 + (self.number or signal.SIGTERM)


def run(config: RunConfig, place: Place, resume: str, notices: Notices, retune: bool = False) -> int:
    """Runs one rank to its end; returns the exit code: 0, or 128 + the signal that stopped it."""
    mistake, folder = notices.told(MISTAKE), notices.folder()
    if mistake:
        raise UserError(mistake)  # which a restart does not mend
    if folder:
        resume, retune = str(folder), False  # whatever restarted ranks began with, they go on with that
    device = choose_device(config.run.device)
    with StopSignal() as stop, connect(place, device, notices.store, config.comm.timeout_s) as world:
        try:
            config = share_cores(config, world)
            data = load_data_set(config.data, config.run.decode_threads or 1)
            stored = None if retune else find_tuning(config, resume, world)
            training = assemble(config, data, world, stop.received, stored=stored)
            summary = train_and_record(config, resume, training, world, partial(notices.tell, FOLDER))
        except BaseException as error:
            if notices.is_first_to_fail() and isinstance(error, UserError):
                notices.tell(MISTAKE, str(error))
            raise
    return 0 if summary.status == "finished" else stop.exit_code()


def find_tuning(config: RunConfig, resume: str, world: World) -> Tuning | None:
    """How the run that goes on has summed its gradients, on all ranks; None if it begins."""
    tuning = stored_tuning(config, resume) if world.rank == 0 else None
    return msgspec.json.decode(world.share_text(msgspec.json.encode(tuning).decode()), type=Tuning | None)


def share_cores(config: RunConfig, world: World) -> RunConfig:
    """Gives this rank its share of the cores, and says so in the recipe: more threads would fight over them."""
    cores = world.collect((host_identity(), usable_cores()))
    threads = config.run.threads or fair_threads(world.rank, cores)
    torch.set_num_threads(threads)
    return config.with_run(threads=threads, decode_threads=config.run.decode_threads or threads)


def train_and_record(
    config: RunConfig,
    resume: str,
    training: Training,
    world: World,
    tell_folder: Callable[[str], None] | None = None,
) -> Summary:
    """Trains from where the run stands.  All ranks return the same status; rank 0's summary has the times."""
    with ExitStack() as stack:
        # Only now is anything written: what can be wrong with a recipe has been found by here.
        recorder, tally = begin(config, resume, training, world, stack)
        if recorder and tell_folder:
            tell_folder(str(recorder.folder.path))
        records: Iterator[Record] = train(training, first_step=tally.steps)
        if config.comm.timeline:
            folder = recorder.folder.path if recorder else None
            records = stack.enter_context(recorded(records, tally.steps, training, world, folder))
        started_s = time.perf_counter() - tally.wall_s
        try:
            for record in records:
                tally.add(record, wall_s=time.perf_counter() - started_s)
                if recorder:
                    recorder.see(record)
                check_skipped(record, tally, training.plan, config.data.skip_limit)
            status: Status = "finished" if tally.steps == training.plan.num_steps else "stopped"
            if recorder:
                recorder.end(status)
        except BaseException as error:
            if recorder:
                recorder.end("diverged" if isinstance(error, Diverged) else "failed")
            raise
        return tally.summary(status)


def check_skipped(record: Record, tally: Tally, plan: StepPlan, limit: float) -> None:
    """All ranks know of all images that were skipped, and end together."""
    if isinstance(record, StepRecord):
        part, skipped, count, complaints = "training", tally.epoch_skipped, plan.num_samples, record.skipped_images
    else:
        part, complaints = "test", record.unreadable
        skipped, count = len(complaints), record.samples_evaluated + len(complaints)
    if complaints and skipped > limit * count:
        raise UserError(
            f"{skipped:,} of {count:,} {part} images were skipped, more than data.skip_limit={limit:g} of them, "
            f"such as {complaints[0]}; mend the set"
        )


class Beginning(Struct, frozen=True):
    """What rank 0 has decided, for the others."""

    problem: str | None
    tally: Tally


def begin(
    config: RunConfig, resume: str, training: Training, world: World, stack: ExitStack
) -> tuple["Recorder | None", Tally]:
    """Rank 0 takes the run's folder and finds where the run stands; all ranks go there."""
    tally = Tally(global_batch=training.plan.global_batch, target_top1=config.train.target_top1)
    problem, folder, start, state, computed_by = None, None, None, {}, ""
    if world.rank == 0:
        try:
            with alone_in_runs(config, resume):
                start = choose_start(config, resume, partial(newest_whole, report=report))
                folder = stack.enter_context(RunFolder(start.folder))
            if start.checkpoint:
                checkpoint = read_description(start.checkpoint)
                tally, computed_by = checkpoint.tally, checkpoint.computed_by
                require_same_images(start.folder, checkpoint.data, training)
                tally.resumed_from_step = tally.steps
                state = read_state(start.checkpoint)
        except (UserError, DamagedCheckpoint) as error:
            problem = str(error)
        except OSError as error:
            folder_name = str(start.folder if start else config.run.dir)
            problem = f"run.dir={folder_name!r} cannot be used ({error.strerror}); give another"
    shared = world.share_text(msgspec.json.encode(Beginning(problem, tally)).decode())
    beginning = msgspec.json.decode(shared, type=Beginning)
    if beginning.problem:
        raise UserError(beginning.problem)
    if beginning.tally.steps:
        restore_training_state(training, world.share_tensors(state))
    if folder is None or start is None:
        return None, beginning.tally
    recorder = Recorder(config, training, world, folder, tally, computed_by)
    stack.enter_context(recorder.screen)
    return recorder, tally


def require_same_images(folder: Path, before: str, training: Training) -> None:
    """Samples are known by their numbers: of another set, others would have been trained on, or be tested on."""
    if before and before != training.data_fingerprint:
        raise UserError(
            f"{folder} was trained on other images than are there now (other files, or in another order); "
            "bring back those, or begin anew in another run.dir"
        )


def report(problem: str) -> None:
    print(f"megabatch: {problem}; it is passed over", file=sys.stderr)


class Recorder:
    """Rank 0's eyes: every record goes to the folder, the screen and, when it is time, into a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        world: World,
        folder: RunFolder,
        tally: Tally,
        computed_by: str,  # up to the checkpoint
    ) -> None:
        self.training, self.folder, self.tally = training, folder, tally
        folder.begin(config.with_run(dir=None), tally.steps)  # so that it can be run again, elsewhere
        if training.gradients.tuning:
            folder.write_text(PLAN, msgspec.json.encode(training.gradients.tuning).decode())
        self.checkpoints = Checkpoints(folder.path, config.checkpoint, tally.steps)
        self.events = EventFile(folder.path, tally.steps)
        self.screen = Screen(config, training, world, folder.path)
        if tally.steps:
            self.screen.show_resumption(tally.steps, computed_by, describe_arithmetic(training))
            self.screen.show_drift(training.gradients.drift)

    def see(self, record: Record) -> None:
        self.folder.write(record)
        self.events.write(record)
        self.screen.show(record)
        if self.checkpoints.wants(record, self.training.plan, self.tally):
            self.save()

    def save(self) -> None:
        self.folder.sync_rows()  # a checkpoint is never ahead of the rows
        self.checkpoints.save(self.training, self.tally)

    def end(self, status: Status) -> None:
        is_whole = status in ("finished", "stopped")
        if is_whole and self.checkpoints.saved_step != self.tally.steps:
            self.save()
        if status == "finished":
            save_weights(self.training, self.folder.path / "model.safetensors")
        summary = self.tally.summary(status)
        self.folder.finish(summary)
        self.events.close()
        if is_whole:
            self.screen.finish(summary)
