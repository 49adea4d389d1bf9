"""When a run saves, how that is done behind its steps, and which checkpoints it keeps.

At a step the state is copied (`snapshot.py`), and that is all that training waits for.  A thread (`background.py`)
looks for inf and NaN in the copy, syncs the rows, writes and hashes the checkpoint under another name, syncs and
renames it, and only then removes older ones: a kill at any moment leaves what was there before, or all of it.
What cannot be written ends nothing before the end of the run: it is said once, and tried again, less and less often.
"""

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
from megabatch.io.disk import make_private, point, remove_unfinished, sync
from megabatch.runs.files import CHECKPOINTS
from megabatch.runs.outage import Outage, pause_s
from megabatch.runs.records import EvaluationRecord, Record, SaveTimes
from megabatch.runs.totals import RunTotals
from megabatch.training.checkpoint.format import (
    AS_INTEGERS,
    Description,
    describe,
    newest_first,
    step_of,
    write_checkpoint,
)
from megabatch.training.checkpoint.state import NUMBER, training_state, what_is
from megabatch.training.parts import Training

# A copy of a training state in the host's memory, so that the next step may change what it was copied from.
#
# On an accelerator the copies are launched behind the step, into pinned memory, and the host does not wait for them:
# the next step's kernels come after them on the same stream.  The memory is used again for the next copy: memory that
# was never written to takes several times as long to fill, so `reserve` writes to it while nobody waits.

CHUNK = 1 << 20  # elements that are looked at at a time


class Snapshot:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.events: list[torch.Event] = []  # before and after the copies, on an accelerator

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Memory for what looks like `state`."""
        self.tensors = {name: memory_for(tensor) for name, tensor in state.items()}
        for tensor in self.tensors.values():
            tensor.view(AS_INTEGERS[tensor.dtype.itemsize]).numpy().fill(0)

    @torch.no_grad()
    def take(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: memory_for(tensor, self.tensors.get(name)) for name, tensor in state.items()}
        device = next((tensor.device for tensor in state.values() if tensor.device.type != "cpu"), None)
        self.events = [torch.Event(device, enable_timing=True) for _ in range(2)] if device else []
        for event in self.events[:1]:
            event.record()
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor, non_blocking=True)
        for event in self.events[1:]:
            event.record()

    def wait(self) -> float:
        """Until all of it is here; the seconds for which the device was busy with it."""
        if not self.events:
            return 0.0
        began, ended = self.events
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


def memory_for(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """As the tensor lies: a copy that also reorders would take longer."""
    layout = (tensor.shape, tensor.stride(), tensor.dtype)
    if before is not None and layout == (before.shape, before.stride(), before.dtype):
        return before
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu", requires_grad=False)


def is_finite(tensor: torch.Tensor) -> bool:
    """By numpy, which takes no threads from those that compute; what it does not know is widened first."""
    if not tensor.is_floating_point():
        return True
    if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    values = tensor.numpy().ravel(order="K")
    return all(np.isfinite(values[begin : begin + CHUNK]).all() for begin in range(0, len(values), CHUNK))


# A thread that writes copies of the training state, one at a time, while training goes on.
#
# There are two copies at most: one is being written, and one waits, or is held: the best state so far, if it could
# not be written, is tried again before the next one.  A third takes the place of the one that waits, unless that is
# the best so far: training never waits for the disk.  Where all are wanted (`keeps_all`) it waits; `is_busy` says
# whether it is better to come later.

COPIES = 2


class Save(Struct):
    """A state that is to become a checkpoint."""

    snapshot: Snapshot
    description: Description  # without its checksum
    is_best: bool  # of all evaluations so far
    stall_s: float | None  # that the host was held by the copy; None once it is recorded


class BackgroundWriter:
    def __init__(self, write: Callable[[Save], bool], keeps_all: bool = False) -> None:
        """`write` returns whether that settles it; what it raises is raised where the next copy is asked for."""
        self.write, self.keeps_all = write, keeps_all
        self.num_overtaken = 0  # states that were never written, because a newer one came first
        self.changed = threading.Condition()
        self.spare = [Snapshot() for _ in range(COPIES)]
        self.queue: list[Save] = []
        self.current: Save | None = None
        self.held: Save | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.reserving: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        is_reserving = self.reserving is not None and self.reserving.is_alive()
        return is_reserving or self.current is not None or bool(self.queue)

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Has memory for the first copy made ready, meanwhile."""
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
        """To be filled and handed to `submit`; None: the best state waits for the disk, and this one is not it."""
        with self.changed:
            self.raise_error()
            if for_best and self.held:
                self.spare.append(self.held.snapshot)
                self.held = None
            if not self.spare and not self.keeps_all:
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
            self.queue += [self.held, save] if self.held else [save]
            self.held = None
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="checkpoints", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def drain(self) -> None:
        """Until everything is written, or was tried."""
        with self.changed:
            self.changed.wait_for(lambda: not self.queue and not self.current)
            self.raise_error()

    def raise_error(self) -> None:
        if self.error:
            error, self.error = self.error, None
            raise error

    def close(self) -> None:
        """The thread ends, after what it has to do."""
        with self.changed:
            thread, self.thread = self.thread, None
            self.changed.notify_all()
        for started in (thread, self.reserving):
            if started:
                started.join()

    def work(self) -> None:
        while save := self.next():
            is_settled = True
            try:
                is_settled = self.write(save)
            except BaseException as error:
                self.error = error
            self.done(save, is_settled)

    def next(self) -> Save | None:
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.thread is None)
            self.current = self.queue.pop(0) if self.queue else None
            return self.current

    def done(self, save: Save, is_settled: bool) -> None:
        with self.changed:
            if save.is_best and not is_settled and not any(later.is_best for later in self.queue):
                self.held = save
            else:
                self.spare.append(save.snapshot)
            self.current = None
            self.changed.notify_all()


LAST, BEST = "last", "best"  # links
AUTO_SHARE = 0.01  # of a run's time may be spent on writing, where the recipe does not say how often
WHAT = "checkpoints"


def nothing() -> None:
    pass


class Checkpoints:
    """The checkpoints of one run, on rank 0."""

    def __init__(
        self,
        run_folder: Path,
        settings: CheckpointSettings,
        first_step: int,
        outage: Outage | None = None,
        sync_rows: Callable[[], None] = nothing,  # a checkpoint is never ahead of the rows
        times: SaveTimes | None = None,  # is added to
    ) -> None:
        self.folder, self.settings = run_folder / CHECKPOINTS, settings
        require_own(self.folder)
        self.outage, self.sync_rows = outage or Outage(), sync_rows
        self.saved_s = time.monotonic()
        self.saving_took_s = 0.0
        self.saved_step = first_step  # on the disk
        self.num_failures = 0  # in a row
        self.problem = ""  # of the last attempt
        self.retry_s = 0.0
        self.times = times or SaveTimes()
        self.background = BackgroundWriter(self.write, keeps_all=settings.keep > COPIES)
        remove_unfinished(self.folder)
        self.forget_after(first_step)

    def forget_after(self, step: int) -> None:
        """A run that resumes from an older checkpoint forgets the newer ones."""
        for path in newest_first(self.folder):
            if step_of(path) > step:
                shutil.rmtree(path)
        for link in (self.folder / LAST, self.folder / BEST):
            if link.is_symlink() and not link.exists():
                link.unlink()

    def wants(self, record: Record, totals: RunTotals) -> bool:
        """After a record: if it is time to save, or if this is the best result so far."""
        if isinstance(record, EvaluationRecord):
            return totals.best_step == record.step or self.is_due(record.step)
        # An evaluation that follows belongs to this step.
        return self.is_due(record.step) and not record.evaluated

    def is_due(self, step: int) -> bool:
        """By the step, whatever is being written; by the time, when nothing is; after a failure, when it is time."""
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
        """After the first step, from which on an optimizer has its state."""
        self.background.reserve(training_state(training))

    def save(self, training: Training, totals: RunTotals) -> None:
        """Copies the state, and returns; `drain` waits until it is written."""
        started_s = time.perf_counter()
        is_best = totals.best_step == totals.steps
        snapshot = self.background.take_spare(for_best=is_best)
        self.times.overtaken = self.background.num_overtaken
        if snapshot is None:
            return
        snapshot.take(training_state(training))
        description = describe(training, copy.deepcopy(totals))
        self.background.submit(Save(snapshot, description, is_best, time.perf_counter() - started_s))

    def write(self, save: Save) -> bool:
        """In the thread: whether that settles it, and it need not be tried again."""
        started_s, step = time.monotonic(), save.description.step
        if save.stall_s is not None:  # and not tried before
            self.times.add_stall(save.stall_s + save.snapshot.wait())
            save.stall_s = None
        bad = next((name for name, tensor in save.snapshot.tensors.items() if not is_sound(name, tensor)), None)
        if bad:
            self.note_failure(f"{what_is(bad)} has inf or NaN at step {step}")
            self.outage.begin(WHAT, "inf or NaN", self.explain(bad, step))
            return True
        try:
            self.sync_rows()
            make_private(self.folder)
            name = write_checkpoint(self.folder, save.snapshot.tensors, save.description)
            if save.is_best:
                point(self.folder / BEST, name)
            point(self.folder / LAST, name)
            sync(self.folder)
        except OSError as error:
            self.note_failure(f"{error.strerror or error} ({error.filename or self.folder})")
            self.outage.failed(WHAT, self.folder, error)
            return False
        self.saved_step, self.saved_s, self.num_failures = step, time.monotonic(), 0
        self.saving_took_s = self.saved_s - started_s
        self.times.count += 1
        self.outage.worked(WHAT)
        with self.outage.survived("the removal of old checkpoints", self.folder):
            self.remove_old()
        return True

    def note_failure(self, problem: str) -> None:
        self.problem = problem
        self.times.failed += 1
        self.num_failures += 1
        self.retry_s = time.monotonic() + pause_s(self.num_failures)

    def explain(self, name: str, step: int) -> str:
        stays = f"that of step {self.saved_step} stays the last" if self.saved_step else "there is none yet"
        return (
            f"{what_is(name)} has inf or NaN at step {step}, and no checkpoint is written with one; {stays}. Training "
            "goes on, and fails at its end if this stays so. Find where it comes from; a buffer that is a constant can "
            "be registered with persistent=False"
        )

    def why_not_saved(self, step: int) -> str:
        """After the last attempt, at the end of a run."""
        have = f"the last checkpoint is that of step {self.saved_step}" if self.saved_step else "there is no checkpoint"
        return f"step {step} could not be saved: {self.problem}; {have}; fix that, and start the run again"

    def drain(self) -> None:
        """Until everything that was copied is written, or has failed to be."""
        self.background.drain()

    def close(self) -> None:
        self.background.close()

    def remove_old(self) -> None:
        """Keeps the newest `checkpoint.keep`, and whatever `last` and `best` point to."""
        pointed = {link.readlink().name for link in (self.folder / LAST, self.folder / BEST) if link.is_symlink()}
        for path in newest_first(self.folder)[self.settings.keep :]:
            if path.name not in pointed:
                shutil.rmtree(path)


def require_own(folder: Path) -> None:
    """Checkpoints are removed: nothing that lies elsewhere, or is no checkpoint, may be taken for one."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is not a folder of its own run, but a link or a file; move it away")
    for link in (folder / LAST, folder / BEST):
        if link.exists() and not link.is_symlink():
            raise UserError(f"{link} is not the link that it should be; move it away")


def is_sound(name: str, tensor: torch.Tensor) -> bool:
    """Numbers that an optimizer keeps may be anything."""
    return name.startswith(NUMBER) or is_finite(tensor)
