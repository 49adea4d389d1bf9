"""Background checkpoints: when a run saves, how a save overlaps with training, and which checkpoints are kept.

Training only waits for a copy of the state (`Snapshot`).  A thread (`BackgroundWriter`) checks it for inf and NaN,
syncs the rows, writes and hashes the checkpoint under a temporary name, syncs and renames it, and then removes older
checkpoints.  A kill at any moment leaves the previous checkpoints or the complete new one.

A failed write does not end training.  It is reported once and retried with growing pauses; the run fails at its end if
its last state is still not saved.
"""

import contextlib
import copy
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

from megabatch.config.schema import CheckpointSettings
from megabatch.errors import UserError
from megabatch.io.disk import make_private, remove_unfinished, replace_link, sync
from megabatch.runs.files import CHECKPOINTS
from megabatch.runs.folder import Outage, pause_s
from megabatch.runs.records import EvaluationRecord, Record, SaveTimes
from megabatch.runs.totals import RunTotals
from megabatch.training.checkpoint.format import (
    INTEGER_DTYPES,
    DamagedCheckpoint,
    Description,
    make_description,
    newest_first,
    read_description,
    step_of,
    write_checkpoint,
)
from megabatch.training.checkpoint.state import NUMBER, readable_name, training_state
from megabatch.training.parts import Training

CHUNK = 1 << 20  # elements per call of np.isfinite


class Snapshot:
    """A copy of the training state in host memory.

    On an accelerator the copies go to pinned memory and are launched after the step.  The host does not wait for them:
    the next step's kernels follow on the same stream.  Memory is reused for the next copy.  The first write to new
    memory takes several times as long, so `reserve` does it in the background.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.events: list[torch.Event] = []  # before and after the copies, on an accelerator

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Allocate memory for a copy of `state`, and touch every page."""
        self.tensors = {name: host_memory(tensor) for name, tensor in state.items()}
        for tensor in self.tensors.values():
            tensor.view(INTEGER_DTYPES[tensor.dtype.itemsize]).numpy().fill(0)

    @torch.no_grad()
    def take(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: host_memory(tensor, self.tensors.get(name)) for name, tensor in state.items()}
        device = next((tensor.device for tensor in state.values() if tensor.device.type != "cpu"), None)
        self.events = [torch.Event(device, enable_timing=True) for _ in range(2)] if device else []
        for event in self.events[:1]:
            event.record()
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor, non_blocking=True)
        for event in self.events[1:]:
            event.record()

    def wait(self) -> float:
        """Wait for the copies, and return the seconds that they took on the device."""
        if not self.events:
            return 0.0
        start, end = self.events
        torch.accelerator.set_device_index(start.device.index)  # of this thread, which would use device 0
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def host_memory(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Return host memory with the strides of `tensor`: a copy that reorders is slower.  Reuse `before` if it fits."""
    layout = (tensor.shape, tensor.stride(), tensor.dtype)
    if before is not None and layout == (before.shape, before.stride(), before.dtype):
        return before
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu", requires_grad=False)


def is_finite(tensor: torch.Tensor) -> bool:
    """Check for inf and NaN with numpy, which takes no threads from training.  Other dtypes are converted to fp32."""
    if not tensor.is_floating_point():
        return True
    if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    values = tensor.numpy().ravel(order="K")
    return all(np.isfinite(values[begin : begin + CHUNK]).all() for begin in range(0, len(values), CHUNK))


COPIES = 2


class Save(Struct):
    """A copied state to be written as a checkpoint."""

    snapshot: Snapshot
    description: Description  # without its checksum
    is_best: bool  # the best evaluation so far
    stall_s: float | None  # time that the copy took on the host; None once it is recorded


class BackgroundWriter:
    """A thread that writes copies of the training state, one at a time, while training continues.

    There are at most two copies: one is being written, the other waits in the queue or is to be retried.  Only the best
    state so far is retried, before the next save.  If both copies are in use, a new save replaces the waiting one
    unless that is the best so far: training never waits for the disk.  With `writes_all` it waits and drops
    no save.

    Args:
        write: writes a save.  Returns False if it should be retried.  An exception is raised in the training thread, by
            the next `take_spare` or `drain`.
        writes_all: wait for the disk instead of dropping saves.
    """

    def __init__(self, write: Callable[[Save], bool], writes_all: bool = False) -> None:
        self.write, self.writes_all = write, writes_all
        self.num_overtaken = 0  # saves that a newer one replaced before they were written
        self.changed = threading.Condition()
        self.spare = [Snapshot() for _ in range(COPIES)]
        self.queue: list[Save] = []
        self.current: Save | None = None
        self.to_retry: Save | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.reserving: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        is_reserving = self.reserving is not None and self.reserving.is_alive()
        return is_reserving or self.current is not None or bool(self.queue)

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Allocate memory for the first copy in the background."""
        with self.changed:
            snapshot = self.spare.pop()

        def work() -> None:
            try:
                snapshot.reserve(state)
            finally:
                with self.changed:
                    self.spare.append(snapshot)
                    self.changed.notify_all()

        self.reserving = threading.Thread(target=work, name="checkpoints", daemon=True)
        self.reserving.start()

    def take_spare(self, for_best: bool) -> Snapshot | None:
        """Return a snapshot to fill and `submit`, or None if this save is dropped in favour of the best one."""
        with self.changed:
            self.raise_error()
            if for_best and self.to_retry:
                self.spare.append(self.to_retry.snapshot)
                self.to_retry = None
            if not self.spare and not self.writes_all:
                self.num_overtaken += 1
                overtaken = next((save for save in self.queue if for_best or not save.is_best), None)
                if overtaken:
                    self.queue.remove(overtaken)
                    self.spare.append(overtaken.snapshot)
                elif not for_best:
                    return None
            self.changed.wait_for(lambda: self.spare)
            self.raise_error()
            return self.spare.pop()

    def submit(self, save: Save) -> None:
        with self.changed:
            self.queue += [self.to_retry, save] if self.to_retry else [save]
            self.to_retry = None
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="checkpoints", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def drain(self) -> None:
        """Wait until every save was written or has failed."""
        with self.changed:
            self.changed.wait_for(lambda: not self.queue and not self.current)
            self.raise_error()

    def raise_error(self) -> None:
        if self.error:
            error, self.error = self.error, None
            raise error

    def close(self) -> None:
        """Write the queued saves, and end the thread."""
        with self.changed:
            thread, self.thread = self.thread, None
            self.changed.notify_all()
        for started in (thread, self.reserving):
            if started:
                started.join()

    def work(self) -> None:
        while save := self.next():
            is_done = True
            try:
                is_done = self.write(save)
            except BaseException as error:
                self.error = error
            self.finish(save, is_done)

    def next(self) -> Save | None:
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.thread is None)
            self.current = self.queue.pop(0) if self.queue else None
            return self.current

    def finish(self, save: Save, is_done: bool) -> None:
        with self.changed:
            if save.is_best and not is_done and not any(later.is_best for later in self.queue):
                self.to_retry = save
            else:
                self.spare.append(save.snapshot)
            self.current = None
            self.changed.notify_all()


LAST, BEST = "last", "best"  # symbolic links
AUTO_SHARE = 0.01  # of the run's time is spent on writing, if the recipe does not set an interval
OUTAGE_KEY = "checkpoints"


def do_nothing() -> None:
    pass


class Checkpoints:
    """The checkpoints of one run, on rank 0."""

    def __init__(
        self,
        run_folder: Path,
        settings: CheckpointSettings,
        first_step: int,
        outage: Outage | None = None,
        sync_rows: Callable[[], None] = do_nothing,  # a checkpoint is never ahead of the rows
        times: SaveTimes | None = None,  # updated by every save
    ) -> None:
        self.folder, self.settings = run_folder / CHECKPOINTS, settings
        require_checkpoint_folder(self.folder)
        self.outage, self.sync_rows = outage or Outage(), sync_rows
        self.saved_s = time.monotonic()
        self.saving_took_s = 0.0
        self.saved_step = first_step  # on the disk
        self.num_failures = 0  # in a row
        self.problem = ""  # why the last attempt failed
        self.is_finite = True  # the last state that was to be written
        self.retry_s = 0.0
        self.times = times or SaveTimes()
        self.background = BackgroundWriter(self.write, writes_all=settings.keep > COPIES)
        remove_unfinished(self.folder)
        self.remove_after(first_step)
        self.scores = scores_in(self.folder) if settings.keep_best > 1 else {}  # by the checkpoint's name

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, at which the run resumes."""
        for path in newest_first(self.folder):
            if step_of(path) > step:
                shutil.rmtree(path)
        for link in (self.folder / LAST, self.folder / BEST):
            if link.is_symlink() and not link.exists():
                link.unlink()

    def should_save(self, record: Record, totals: RunTotals) -> bool:
        """Return True if a save is due after this record, or if it is the best evaluation so far."""
        if isinstance(record, EvaluationRecord):
            return totals.best_step == record.step or self.is_among_best(record.score) or self.is_due(record.step)
        # The evaluation of this step follows, and its record saves.
        return self.is_due(record.step) and not record.evaluated

    def is_among_best(self, score: float) -> bool:
        """Return True if fewer than `keep_best` checkpoints have at least this score, and several are kept."""
        others = [other for other in list(self.scores.values()) if other >= score]
        return self.settings.keep_best > 1 and len(others) < self.settings.keep_best

    def is_due(self, step: int) -> bool:
        """Return True if a save is due: at every `every_steps`, or by time if no save is in progress.

        After a failure, it is due when the pause before the next attempt has passed.
        """
        steps, minutes = self.settings.every_steps, self.settings.every_minutes
        now_s = time.monotonic()
        if self.num_failures:
            return now_s >= self.retry_s and not self.background.is_busy
        if steps and step % steps == 0:
            return True
        if self.background.is_busy:
            return False
        since_s = now_s - self.saved_s
        if not steps and not minutes:
            return since_s * AUTO_SHARE >= self.saving_took_s
        return bool(minutes and since_s >= 60 * minutes)

    def reserve(self, training: Training) -> None:
        """Allocate memory for the first copy.  Call it after the first step, which creates the optimizer's state."""
        self.background.reserve(training_state(training))

    def save(self, training: Training, totals: RunTotals) -> None:
        """Copy the state, and write it in the background.  `drain` waits until it is written."""
        started_s = time.perf_counter()
        is_best = totals.best_step == totals.steps
        snapshot = self.background.take_spare(for_best=is_best)
        self.times.overtaken = self.background.num_overtaken
        if snapshot is None:
            return
        snapshot.take(training_state(training))
        description = make_description(training, copy.deepcopy(totals))
        self.background.submit(Save(snapshot, description, is_best, time.perf_counter() - started_s))

    def write(self, save: Save) -> bool:
        """Write a checkpoint.  Called in the thread.  Returns False if the write failed and should be retried."""
        started_s, step = time.monotonic(), save.description.step
        if save.stall_s is not None:  # the first attempt
            self.times.add_stall(save.stall_s + save.snapshot.wait())
            save.stall_s = None
        bad = next((name for name, tensor in save.snapshot.tensors.items() if not is_savable(name, tensor)), None)
        self.is_finite = not bad
        if bad:
            self.note_failure(f"{readable_name(bad)} has inf or NaN at step {step}")
            self.outage.begin(OUTAGE_KEY, "inf or NaN", self.nan_message(bad, step))
            return True
        try:
            self.sync_rows()
            make_private(self.folder)
            name = write_checkpoint(self.folder, save.snapshot.tensors, save.description)
            if save.is_best:
                replace_link(self.folder / BEST, name)
            replace_link(self.folder / LAST, name)
            sync(self.folder)
        except OSError as error:
            self.note_failure(f"{error.strerror or error} ({error.filename or self.folder})")
            self.outage.failed(OUTAGE_KEY, self.folder, error)
            return False
        self.saved_step, self.saved_s, self.num_failures = step, time.monotonic(), 0
        self.saving_took_s = self.saved_s - started_s
        self.times.count += 1
        self.outage.worked(OUTAGE_KEY)
        evaluation = save.description.totals.evaluation
        if self.settings.keep_best > 1 and evaluation and evaluation.step == step:
            self.scores[name] = evaluation.score
        with self.outage.survived("the removal of old checkpoints", self.folder):
            self.remove_old()
        return True

    def note_failure(self, problem: str) -> None:
        self.problem = problem
        self.times.failed += 1
        self.num_failures += 1
        self.retry_s = time.monotonic() + pause_s(self.num_failures)

    def nan_message(self, name: str, step: int) -> str:
        last = f"the last checkpoint is at step {self.saved_step}" if self.saved_step else "there is no checkpoint yet"
        return (
            f"{readable_name(name)} has inf or NaN at step {step}, so no checkpoint is written; {last}. Training "
            "continues, and fails at its end if inf or NaN remains. Find its source; register a constant buffer with "
            "persistent=False"
        )

    def not_saved_message(self, step: int, weights: Path | None = None) -> str:
        """Return the error message of a run whose last state could not be saved, but possibly its final `weights`."""
        last = f"the last checkpoint is at step {self.saved_step}" if self.saved_step else "there is no checkpoint"
        if weights and self.is_finite:
            return (
                f"the checkpoint of step {step} could not be saved: {self.problem}; the trained model is complete: "
                f"{weights}; {last}, from which the same command would repeat the rest"
            )
        return f"step {step} could not be saved: {self.problem}; {last}; fix the cause and start the run again"

    def drain(self) -> None:
        """Wait until every copied state was written or its write failed."""
        self.background.drain()

    def close(self) -> None:
        self.background.close()

    def remove_old(self) -> None:
        """Remove all but the newest `keep` checkpoints, the best `keep_best`, and the targets of `last` and `best`."""
        linked = {link.readlink().name for link in (self.folder / LAST, self.folder / BEST) if link.is_symlink()}
        by_score = sorted(self.scores, key=lambda name: (-self.scores[name], name))  # of equals, the earlier one
        linked |= {*by_score[: self.settings.keep_best]}
        for path in newest_first(self.folder)[self.settings.keep :]:
            if path.name not in linked:
                shutil.rmtree(path)
                self.scores.pop(path.name, None)


def scores_in(folder: Path) -> dict[str, float]:
    """Return the scores of the checkpoints that were saved after an evaluation, by their names."""
    scores = {}
    for path in newest_first(folder):
        with contextlib.suppress(DamagedCheckpoint):
            description = read_description(path)
            evaluation = description.totals.evaluation
            if evaluation and evaluation.step == description.step:
                scores[path.name] = evaluation.score
    return scores


def require_checkpoint_folder(folder: Path) -> None:
    """Raise UserError for a folder in which old checkpoints cannot be removed safely, such as a link to another one."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is a link or a file, not a folder; move it away")
    for link in (folder / LAST, folder / BEST):
        if link.exists() and not link.is_symlink():
            raise UserError(f"{link} is not a symbolic link; move it away")


def is_savable(name: str, tensor: torch.Tensor) -> bool:
    """Return True if a tensor has no inf or NaN.  Python numbers of an optimizer may have any value."""
    return name.startswith(NUMBER) or is_finite(tensor)
