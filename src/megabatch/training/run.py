"""A whole run on one rank: prepare, begin or resume, train, and on rank 0 record everything."""

import importlib.util
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from megabatch.config.schema import RunConfig
from megabatch.errors import Diverged, NotSaved, UserError
from megabatch.io.disk import remedy
from megabatch.planning.batch import StepPlan
from megabatch.ranks.signals import StopRequest
from megabatch.ranks.store import RUN_FOLDER, USER_ERROR, RankStore
from megabatch.runs.files import CHECKPOINTS, MISTAKES, MODEL, PLAN, STEP_TRACE, SUMMARY, WEIGHTS
from megabatch.runs.folder import RUNS, RunFolder, numbering_lock
from megabatch.runs.outage import Say
from megabatch.runs.records import EvaluationRecord, Record, Status, StepRecord, StepTrace, Summary
from megabatch.runs.totals import RunTotals
from megabatch.text import one_line, print_line
from megabatch.training.checkpoint.card import with_results
from megabatch.training.checkpoint.format import describe_arithmetic, save_weights
from megabatch.training.checkpoint.resume import choose_start, is_numbered, newest_of, read_start, report
from megabatch.training.checkpoint.save import Checkpoints, require_own
from megabatch.training.checkpoint.state import restore_training_state
from megabatch.training.environment import describe_environment
from megabatch.training.loop import never, train
from megabatch.training.parts import Training
from megabatch.training.prepare import prepare
from megabatch.training.screen import Screen
from megabatch.training.traces import recorded, traced

# TensorBoard events beside metrics.jsonl, where TensorBoard is installed.

STEP_SCALARS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "images_per_s": "speed/images_per_s",
}
EVALUATION_SCALARS = {"top1": "test/top1", "top5": "test/top5", "test_loss": "test/loss"}


class EventFile:
    """If the disk does not take one event, they end there: nothing else depends on them."""

    def __init__(self, folder: Path, first_step: int, say: Say) -> None:
        self.writer, self.folder, self.say = None, folder, say
        self.hook_before = threading.excepthook
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = self.hear_thread
            with self.ending_at(first_step):
                # Events of steps that a resumed run takes again are hidden.
                self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)
                for path in folder.glob("events.out.tfevents.*"):
                    path.chmod(path.stat().st_mode & 0o600)  # TensorBoard follows the umask

    def write(self, record: Record) -> None:
        if self.writer:
            scalars = EVALUATION_SCALARS if isinstance(record, EvaluationRecord) else STEP_SCALARS
            with self.ending_at(record.step):
                for field, tag in scalars.items():
                    self.writer.add_scalar(tag, getattr(record, field), record.step)

    @contextmanager
    def ending_at(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.writer = None
            reason = error.strerror or error
            self.say("warning", f"TensorBoard's events end at step {step}: {reason} ({self.folder})")

    def hear_thread(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread would print a traceback of what it also raises at the next event."""
        is_known = isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard")
        if not is_known:
            self.hook_before(failure)

    def close(self) -> None:
        if self.writer:
            with suppress(OSError):
                self.writer.close()
            self.writer = None
        threading.excepthook = self.hook_before


def run(
    config: RunConfig,
    resume: str,
    store: RankStore,
    retune: bool = False,
    ending: AbstractContextManager[object] | None = None,  # is left when the run has ended, before any rank leaves
) -> int:
    """Runs one rank to its end; returns the exit code: 0, or 128 + the signal that stopped it."""
    mistake, folder = store.get(USER_ERROR), store.run_folder()
    if mistake:
        raise UserError(mistake)  # which a restart does not fix
    if folder:
        resume, retune = str(folder), False  # whatever restarted ranks began with, they resume that
    with (
        StopRequest(signal.Signals[config.run.preempt_signal]) as stop,
        prepare(config, store.info, store, stop_requested=stop.received, resume=resume, retune=retune) as ready,
        ready.training.world.rank_0_leaves_first(),
        store.failures_announced(),  # here too: before the others hear that rank 0 has failed
        ending or nullcontext(),
    ):
        summary = train_and_record(ready.config, resume, ready.training, partial(store.set, RUN_FOLDER))
        is_stopped = summary.status == "stopped"
        if is_stopped and store.info.rank == 0:  # for a batch system's script, as the exit code is
            code = stop.exit_code()
            print_line(
                f"requeue   {signal.Signals(code - 128).name} after step {summary.steps}, which is saved: "
                f"the same command resumes, exit code {code}"
            )
    return stop.exit_code() if is_stopped else 0


def train_and_record(
    config: RunConfig,
    resume: str,
    training: Training,
    announce: Callable[[str], None] | None = None,  # hears the run's folder
    observe: Callable[[Record], None] | None = None,  # sees every record on rank 0, after it was written
) -> Summary:
    """Trains from where the run stands.  All ranks return the same status; rank 0's summary has the times."""
    with ExitStack() as stack:
        # Only now is anything written: what can be wrong with a recipe has been found by here.
        recorder, totals = begin(config, resume, training, stack)
        if recorder and announce:
            announce(str(recorder.folder.path))
        is_due = recorder.checkpoints.is_due if recorder else never
        records: Iterator[Record] = train(training, totals.steps, is_due)
        if config.comm.timeline:
            folder = recorder.folder.path if recorder else None
            records = stack.enter_context(recorded(records, totals.steps, training, folder))
        if recorder:
            records = traced(records, totals.steps, training, recorder.write_trace)
        started_s = time.perf_counter() - totals.wall_s
        try:
            for record in records:
                wall_s = time.perf_counter() - started_s
                record = msgspec.structs.replace(record, wall_s=round(wall_s, 6))
                totals.add(record, wall_s)
                if recorder:
                    recorder.see(record)
                    if observe:
                        observe(record)
                check_skipped(record, totals, training.plan, config.data.skip_limit)
        except BaseException as error:
            if recorder:
                recorder.end_early("diverged" if isinstance(error, Diverged) else "failed")
            raise
        status: Status = "finished" if totals.steps == training.plan.num_steps else "stopped"
        if recorder:
            recorder.end(status)
        return totals.summary(status)


def check_skipped(record: Record, totals: RunTotals, plan: StepPlan, limit: float) -> None:
    """All ranks know of all images that were skipped, and end together."""
    if isinstance(record, StepRecord):
        part, skipped, count, complaints = "training", totals.epoch_skipped, plan.num_samples, record.skipped_images
    else:
        part, complaints = "test", record.unreadable
        skipped, count = len(complaints), record.samples_evaluated + len(complaints)
    if complaints and skipped > limit * count:
        raise UserError(
            f"{skipped:,} of {count:,} {part} images were skipped, more than data.skip_limit={limit:g} of them, "
            f"such as {complaints[0]}; fix the set"
        )


class Beginning(Struct, frozen=True):
    """What rank 0 has decided, for the others."""

    problem: str | None
    totals: RunTotals


def begin(config: RunConfig, resume: str, training: Training, stack: ExitStack) -> tuple["Recorder | None", RunTotals]:
    """Rank 0 takes the run's folder and finds where the run stands; all ranks go there."""
    totals = RunTotals(global_batch=training.plan.global_batch, target_top1=config.train.target_top1)
    problem, folder, start, state, computed_by, checkpoints = None, None, None, {}, "", None
    world = training.world
    if world.rank == 0:
        try:
            with numbering_lock() if is_numbered(config, resume) else nullcontext():
                start = choose_start(config, resume, newest_of)
                folder = stack.enter_context(RunFolder(start.folder))
            require_own(start.folder / CHECKPOINTS)
            checkpoint = read_start(start, report, training)
            if checkpoint:
                totals, computed_by = checkpoint.description.totals, one_line(checkpoint.description.computed_by, 200)
                require_same_images(start.folder, checkpoint.description.data, training)
                totals.resumed_from_step = totals.steps
                state = checkpoint.state
            require_weights(config, training, totals)
            checkpoints = begin_folder(config, training, folder, totals)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            folder_name = str(start.folder if start else config.run.dir or RUNS)
            problem = f"run.dir={folder_name!r} cannot be used ({error.strerror}); give another"
    shared = world.broadcast_text(msgspec.json.encode(Beginning(problem, totals)).decode())
    beginning = msgspec.json.decode(shared, type=Beginning)
    if beginning.problem:
        raise UserError(beginning.problem)
    if beginning.totals.steps:
        restore_training_state(training, world.broadcast_tensors(state))
    if folder is None or checkpoints is None:
        return None, beginning.totals
    stack.callback(checkpoints.close)
    recorder = Recorder(config, training, folder, totals, checkpoints, computed_by)
    stack.enter_context(recorder.screen)
    return recorder, totals


def begin_folder(config: RunConfig, training: Training, folder: RunFolder, totals: RunTotals) -> Checkpoints:
    """Writes what describes the run, and removes what comes after where it stands."""
    # Without its folder, so that the recipe can be run again, elsewhere.
    environment = describe_environment(training.world.num_ranks, training.gradients.topology.num_nodes)
    folder.begin(config.with_run(dir=None).to_toml(), environment, totals.steps)
    if training.gradients.plans.tuning:
        folder.describe(PLAN, msgspec.json.encode(training.gradients.plans.tuning).decode())
    folder.describe(MODEL, with_results(training.card, totals).to_json())
    return Checkpoints(folder.path, config.checkpoint, totals.steps, folder.outage, folder.sync_rows, totals.saves)


def require_weights(config: RunConfig, training: Training, totals: RunTotals) -> None:
    if config.model.weights and not training.initial_weights and not totals.steps:
        raise UserError("the run that was to be resumed is in use by now; start again")  # it has read no weights


def require_same_images(folder: Path, before: str, training: Training) -> None:
    """Samples are known by their numbers: of another set, others would have been trained on, or be tested on."""
    if before and before != training.data_fingerprint:
        raise UserError(
            f"{folder} was trained on other images than are there now (other files, or in another order); "
            "bring back those, or train again in another run.dir"
        )


class Recorder:
    """Rank 0's eyes: every record goes to the folder, the screen and, when it is time, into a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        folder: RunFolder,
        totals: RunTotals,
        checkpoints: Checkpoints,
        computed_by: str,  # up to the checkpoint
    ) -> None:
        self.training, self.folder, self.totals, self.checkpoints = training, folder, totals, checkpoints
        self.screen = Screen(config, training, folder.path)
        self.has_seen = False  # a record
        folder.outage.say = self.say
        self.events = EventFile(folder.path, totals.steps, self.say)
        if totals.steps:
            self.screen.show_resumption(totals.steps, computed_by, describe_arithmetic(training))
            self.screen.show_drift(training.gradients.plans.drift)
        if training.gradients.plans.is_chosen_again:
            self.say("allreduce", "what was chosen before does not fit these ranks and gradients; it is chosen again")

    def say(self, name: str, text: str) -> None:
        self.screen.say(name, text)
        self.folder.log(f"{name} after step {self.totals.steps}: {text}")

    def see(self, record: Record) -> None:
        if not self.has_seen:
            self.has_seen = True
            self.checkpoints.reserve(self.training)
        self.folder.write(record)
        self.events.write(record)
        if isinstance(record, EvaluationRecord):
            self.write_mistakes(record.step)
        self.screen.show(record)
        # On an accelerator the next step may have been begun: then the weights are not those of the record any more.
        is_current = record.step == self.training.gradients.num_steps
        is_current = is_current and self.training.comparison.covers(record.step)  # else the next step is compared
        if is_current and self.checkpoints.wants(record, self.totals):
            self.training.world.activity.begin("checkpoint")
            self.checkpoints.save(self.training, self.totals)

    def end(self, status: Status) -> None:
        """Waits until the result is on the disk; raises `NotSaved` if it cannot be."""
        problem = self.save_result(status)
        self.events.close()
        summary = self.totals.summary("failed" if problem else status)
        try:
            self.folder.finish(summary)
        except OSError as error:
            problem = problem or cannot_write(self.folder.path / SUMMARY, error)
        if problem:
            raise NotSaved(problem)
        self.screen.finish(summary)

    def end_early(self, status: Status) -> None:
        """After an error, which is what the user is to hear of."""
        self.checkpoints.close()
        self.events.close()
        for write in (self.folder.sync_rows, self.write_card, partial(self.folder.finish, self.totals.summary(status))):
            with suppress(OSError):
                write()

    def save_result(self, status: Status) -> str | None:
        """Why the last state, its rows, the card or the weights are not on the disk, if so."""
        self.checkpoints.drain()
        if self.checkpoints.saved_step != self.totals.steps:
            self.checkpoints.save(self.training, self.totals)
            self.checkpoints.drain()
        path = self.folder.path
        try:
            self.folder.sync_rows()
            path = self.folder.path / MODEL
            self.write_card()
            if status == "finished":
                path = self.folder.path / WEIGHTS
                save_weights(self.training, self.totals, path)
        except OSError as error:
            return cannot_write(path, error)
        if self.checkpoints.saved_step != self.totals.steps:
            return self.checkpoints.why_not_saved(self.totals.steps)
        return None

    def write_trace(self, trace: StepTrace) -> None:
        with suppress(OSError):
            self.folder.describe(STEP_TRACE, msgspec.json.encode(trace).decode())

    def write_mistakes(self, step: int) -> None:
        """For whoever looks at the run; it ends for the sake of no picture."""
        newest = self.training.mistakes.newest
        if newest:
            with suppress(OSError):
                self.folder.describe(MISTAKES, msgspec.json.encode(msgspec.structs.replace(newest, step=step)).decode())

    def write_card(self) -> None:
        self.folder.describe(MODEL, with_results(self.training.card, self.totals).to_json())


def cannot_write(path: Path, error: OSError) -> str:
    return f"{error.filename or path} cannot be written: {error.strerror or error}; {remedy(error)}, and start again"
