"""A whole run on one rank: prepare, start or resume, train.  Rank 0 also writes all records."""

import importlib.util
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from megabatch import __version__
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.encoded import round_up
from megabatch.errors import Diverged, NotSaved, UserError
from megabatch.io.disk import remedy
from megabatch.planning.batch import StepPlan
from megabatch.ranks.discover import warn_of_signal
from megabatch.ranks.launch import COMMAND
from megabatch.ranks.machine import cpu_name, usable_cores
from megabatch.ranks.signals import StopRequest
from megabatch.ranks.store import RUN_FOLDER, USER_ERROR, RankStore
from megabatch.runs.files import CHECKPOINTS, MISTAKES, MODEL, PLAN, STEP_TRACE, SUMMARY, WEIGHTS
from megabatch.runs.folder import ReportLine, RunFolder, numbering_lock
from megabatch.runs.records import EvaluationRecord, Record, Status, StepRecord, StepTrace, Summary
from megabatch.runs.totals import RunTotals
from megabatch.text import one_line, print_line
from megabatch.torch_api import postpone_compiler
from megabatch.training.checkpoint.card import with_results
from megabatch.training.checkpoint.format import describe_arithmetic, save_weights
from megabatch.training.checkpoint.resume import Start, new_folder, read_start, report
from megabatch.training.checkpoint.save import Checkpoints, require_checkpoint_folder
from megabatch.training.checkpoint.state import restore_training_state
from megabatch.training.device import accelerator_names
from megabatch.training.loop import train
from megabatch.training.mllog import MlperfLog
from megabatch.training.parts import Training, never
from megabatch.training.prepare import StoppedEarly, prepare
from megabatch.training.screen import Screen
from megabatch.training.traces import record_timeline, trace_step

# Variables that explain a run's speed or numerics.  An allow-list, because an environment also holds secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
)
STEP_SCALARS = {
    "loss": "train/loss",
    "top1": "train/top1",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "images_per_s": "speed/images_per_s",
}
EVALUATION_SCALARS = {
    "top1": "test/top1",
    "raw_top1": "test/raw_top1",
    "top5": "test/top5",
    "mean_average_precision": "test/mean_average_precision",
    "test_loss": "test/loss",
}


class EventFile:
    """TensorBoard events beside metrics.jsonl, if TensorBoard is installed.  They end at the first failed write."""

    def __init__(self, folder: Path, first_step: int, report: ReportLine) -> None:
        self.writer, self.folder, self.report = None, folder, report
        self.hook_before = threading.excepthook
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = self.handle_thread_error
            with self.end_on_error(first_step):
                # `purge_step` hides events of steps that a resumed run repeats.
                self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)
                for path in folder.glob("events.out.tfevents.*"):
                    path.chmod(path.stat().st_mode & 0o600)  # TensorBoard follows the umask

    def write(self, record: Record) -> None:
        if self.writer:
            scalars = EVALUATION_SCALARS if isinstance(record, EvaluationRecord) else STEP_SCALARS
            with self.end_on_error(record.step):
                for field, tag in scalars.items():
                    value = getattr(record, field)
                    if value is not None:
                        self.writer.add_scalar(tag, value, record.step)

    @contextmanager
    def end_on_error(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.writer = None
            reason = error.strerror or error
            self.report("warning", f"TensorBoard's events end at step {step}: {reason} ({self.folder})")

    def handle_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        """Suppress the traceback of TensorBoard's thread for an OSError that the next event raises anyway."""
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
    ending: AbstractContextManager[object] | None = None,  # exited after the run, before any rank exits
) -> int:
    """Run one rank to its end.  Return the exit code: 0, or 128 + the signal that stopped it."""
    if not config.model.compile:
        postpone_compiler()
    user_error, folder = store.get(USER_ERROR), store.run_folder()
    if user_error:
        raise UserError(user_error)  # a restart does not fix it
    if folder:
        resume, retune = str(folder), False  # restarted ranks resume the run of the first attempt
    warning = warn_of_signal(config.run.preempt_signal)
    if warning and store.info.rank == 0:
        print_line(f"warning   {warning}")
    with (
        StopRequest(signal.Signals[config.run.preempt_signal]) as stop,
        suppress(StoppedEarly),
        prepare(config, store.info, store, stop_requested=stop.received, resume=resume, retune=retune) as ready,
        ready.training.world.rank_0_leaves_first(),
        ending or nullcontext(),
    ):
        summary = train_and_record(ready.config, ready.start, ready.training, partial(store.set, RUN_FOLDER))
        is_stopped = summary.status == "stopped"
        if is_stopped and store.info.rank == 0:  # for scripts of batch systems, like the exit code
            code = stop.exit_code()
            print_line(
                f"requeue   {signal.Signals(code - 128).name} after step {summary.steps}, which is saved; "
                f"the same command resumes the run; exit code {code}"
            )
        return stop.exit_code() if is_stopped else 0
    code = stop.exit_code()
    if store.info.rank == 0:
        print_line(f"stopped   {signal.Signals(code - 128).name} before the ranks were connected; exit code {code}")
    return code


def train_and_record(
    config: RunConfig,
    start: Start | None,
    training: Training,
    announce: Callable[[str], None] | None = None,  # called with the run's folder
    observe: Callable[[Record], None] | None = None,  # called on rank 0 with every record after it was written
) -> Summary:
    """Train from the start or the checkpoint to the end.  The status is the same on all ranks; rank 0 adds times."""
    with ExitStack() as stack:
        # `prepare` checked the recipe; the first files are written from here on.
        recorder, totals = begin(config, start, training, stack)
        if recorder and announce:
            announce(str(recorder.folder.path))
        is_due = recorder.checkpoints.is_due if recorder else never
        records: Iterator[Record] = train(training, totals.steps, is_due, lambda: totals.end_reason is not None)
        if config.comm.timeline:
            folder = recorder.folder.path if recorder else None
            stack.enter_context(record_timeline(totals.steps, training, folder))
        if recorder:
            records = trace_step(records, totals.steps, training, recorder.write_trace)
        started_s = time.perf_counter() - totals.wall_s
        try:
            for record in records:
                record = totals.add(record, time.perf_counter() - started_s)
                if recorder:
                    recorder.add(record)
                    if observe:
                        observe(record)
                check_skipped(record, totals, training.plan, config.data.skip_limit)
        except BaseException as error:
            training.world.announce(error)
            if recorder:
                recorder.end_early("diverged" if isinstance(error, Diverged) else "failed")
            raise
        is_finished = totals.steps == training.plan.num_steps or totals.end_reason is not None
        status: Status = "finished" if is_finished else "stopped"
        if recorder:
            recorder.end(status)
        return totals.summary(status)


def check_skipped(record: Record, totals: RunTotals, plan: StepPlan, limit: float) -> None:
    """Raise on all ranks if too many images were skipped.  Every rank has the lines of all ranks."""
    if isinstance(record, StepRecord):
        part, skipped, count, lines = "training", totals.epoch_skipped, plan.num_samples, record.skipped_images
    else:
        part, lines = "test", record.unreadable
        skipped, count = len(lines), record.samples_evaluated + len(lines)
    if lines and skipped > limit * count:
        raise UserError(
            f"{skipped:,} of {count:,} {part} images were skipped, more than data.skip_limit={limit:g} of them, "
            f"such as {lines[0]}; fix the data set (megabatch check lists them), or set "
            f"data.skip_limit={round_up(skipped / count):g}"
        )


class StartState(Struct, frozen=True):
    """Rank 0's decision on how the run starts, as broadcast to all ranks."""

    problem: str | None
    totals: RunTotals


def begin(
    config: RunConfig, start: Start | None, training: Training, stack: ExitStack
) -> tuple["Recorder | None", RunTotals]:
    """Open the run's folder on rank 0 and restore the checkpoint, if there is one, on all ranks."""
    totals = RunTotals(
        global_batch=training.plan.global_batch,
        target_top1=config.train.target_top1,
        patience=config.train.patience,
        stop_at_target=config.train.stop_at_target,
    )
    problem, folder, state, computed_by, checkpoints = None, None, {}, "", None
    world = training.world
    assert start is not None  # `prepare` sets it if `resume` is given
    path = start.folder
    if world.rank == 0:
        try:
            with numbering_lock() if start.is_new and config.run.dir is None else nullcontext():
                path = new_folder(config) if start.is_new else start.folder
                folder = stack.enter_context(RunFolder(path))
            require_checkpoint_folder(path / CHECKPOINTS)
            checkpoint = read_start(start, report, training)
            if checkpoint:
                totals, computed_by = checkpoint.description.totals, one_line(checkpoint.description.computed_by, 200)
                require_same_images(path, checkpoint.description.data, training)
                totals.resumed_from_step = totals.steps
                state = checkpoint.state
            checkpoints = begin_folder(config, training, folder, totals)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"run.dir={str(path)!r} cannot be used ({error.strerror}); use another folder"
    shared = world.broadcast_text(msgspec.json.encode(StartState(problem, totals)).decode())
    shared_start = msgspec.json.decode(shared, type=StartState)
    if shared_start.problem:
        raise UserError(shared_start.problem)
    if shared_start.totals.steps:
        restore_training_state(training, world.broadcast_tensors(state))
    if folder is None or checkpoints is None:
        return None, shared_start.totals
    stack.callback(checkpoints.close)
    recorder = Recorder(config, training, folder, totals, checkpoints, computed_by)
    stack.enter_context(recorder.screen)
    return recorder, totals


def begin_folder(config: RunConfig, training: Training, folder: RunFolder, totals: RunTotals) -> Checkpoints:
    """Write the description of the run, and remove rows after the step it starts from."""
    # Without run.dir, so that the recipe can be run again elsewhere.
    environment = describe_environment(training.world.num_ranks, training.gradients.topology.num_nodes)
    folder.begin(config.with_run(dir=None).to_toml(), environment, totals.steps)
    if training.gradients.plans.tuning:
        folder.write_text(PLAN, msgspec.json.encode(training.gradients.plans.tuning).decode())
    folder.write_text(MODEL, with_results(training.card, totals).to_json())
    return Checkpoints(folder.path, config.checkpoint, totals.steps, folder.outage, folder.sync_rows, totals.saves)


def require_same_images(folder: Path, before: str, training: Training) -> None:
    """Raise if the data set changed since the checkpoint: samples are identified by number only."""
    if before and before != training.data_fingerprint:
        raise UserError(
            f"{folder} was trained on different images (files or their order have changed since); "
            "restore them, or train in another run.dir"
        )


class Recorder:
    """Rank 0's output: writes every record to the folder and the screen, and saves checkpoints when they are due."""

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        folder: RunFolder,
        totals: RunTotals,
        checkpoints: Checkpoints,
        computed_by: str,  # the arithmetic of the steps before the checkpoint
    ) -> None:
        self.training, self.folder, self.totals, self.checkpoints = training, folder, totals, checkpoints
        self.screen = Screen(config, training, folder.path)
        self.has_records = False
        folder.outage.report = self.report
        self.events = EventFile(folder.path, totals.steps, self.report)
        self.mllog = MlperfLog(config, training, folder.path) if config.run.mllog and not totals.steps else None
        if totals.steps:
            self.screen.show_resumption(totals.steps, computed_by, describe_arithmetic(training))
            self.screen.show_drift(training.gradients.plans.drift)
        if training.gradients.plans.is_rechosen:
            self.report("allreduce", "the stored plan does not fit these ranks and gradients; chose a new one")

    def report(self, name: str, text: str) -> None:
        self.screen.print_row(name, text)
        self.folder.log(f"{name} after step {self.totals.steps}: {text}")

    def add(self, record: Record) -> None:
        if not self.has_records:
            self.has_records = True
            self.checkpoints.reserve(self.training)
        self.folder.write(record)
        self.events.write(record)
        if self.mllog:
            self.mllog.write(record)
        if isinstance(record, EvaluationRecord):
            self.write_mistakes(record.step)
        self.screen.show(record)
        # On an accelerator the next step may have been launched, and then the weights are newer than the record.
        is_current = record.step == self.training.gradients.num_steps
        is_current = is_current and self.training.comparison.covers(
            record.step
        )  # else ranks are compared at the next step
        if is_current and self.checkpoints.should_save(record, self.totals):
            self.training.world.activity.begin("checkpoint")
            self.checkpoints.save(self.training, self.totals)

    def end(self, status: Status) -> None:
        """Write the result and wait until it is on disk.  Raise `NotSaved` if it cannot be written."""
        if self.mllog:
            self.mllog.end()
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
        """Write what is possible after an error.  Errors here are suppressed: the user sees the first one."""
        if self.mllog:
            self.mllog.end()
        self.checkpoints.close()
        self.events.close()
        for write in (self.folder.sync_rows, self.write_card, partial(self.folder.finish, self.totals.summary(status))):
            with suppress(OSError):
                write()

    def save_result(self, status: Status) -> str | None:
        """Write the last checkpoint, rows, card and weights.  Return the reason if one of them failed."""
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
            weights = path if status == "finished" else None
            return self.checkpoints.not_saved_message(self.totals.steps, weights)
        return None

    def write_trace(self, trace: StepTrace) -> None:
        with suppress(OSError):
            self.folder.write_text(STEP_TRACE, msgspec.json.encode(trace).decode())

    def write_mistakes(self, step: int) -> None:
        """Write the last evaluation's mistakes for the report.  Failing to write them does not end the run."""
        newest = self.training.mistakes.newest
        if newest:
            with suppress(OSError):
                self.folder.write_text(
                    MISTAKES, msgspec.json.encode(msgspec.structs.replace(newest, step=step)).decode()
                )

    def write_card(self) -> None:
        self.folder.write_text(MODEL, with_results(self.training.card, self.totals).to_json())


def cannot_write(path: Path, error: OSError) -> str:
    return f"{error.filename or path} cannot be written: {error.strerror or error}; {remedy(error)}, and start again"


def describe_environment(num_ranks: int = 1, num_hosts: int = 1) -> dict[str, object]:
    """Return the machine and software of a run, for env.json."""
    return {
        "command": command_line(),
        "ranks": num_ranks,
        "hosts": num_hosts,
        "megabatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": len(usable_cores()),
        "directory": str(Path.cwd()),  # relative paths in the recipe start here
        "gpus": accelerator_names(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def command_line() -> str | None:
    """Return the megabatch command that the user typed; None in a user's script."""
    given = os.environ.get(COMMAND)
    program = Path(sys.argv[0])
    # `megabatch` under srun and mpiexec, `python -m megabatch` under torchrun.
    if given is None and "megabatch" in (program.name, program.parent.name):
        given = shlex.join(["megabatch", *sys.argv[1:]])
    return given
