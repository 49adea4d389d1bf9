"""TensorBoard events beside metrics.jsonl, where TensorBoard is installed."""

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megabatch.runs.outage import Say
from megabatch.runs.records import EvaluationRecord, Record

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
