"""TensorBoard events beside metrics.jsonl, where TensorBoard is installed."""

import importlib.util
from pathlib import Path

from megabatch.runs.records import EvaluationRecord, Record

STEP_SCALARS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "images_per_s": "speed/images_per_s",
}
EVALUATION_SCALARS = {"top1": "test/top1", "top5": "test/top5", "test_loss": "test/loss"}


class EventFile:
    def __init__(self, folder: Path, first_step: int) -> None:
        self.writer = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # Events of steps that a resumed run takes again are hidden.
            self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: Record) -> None:
        if self.writer:
            scalars = EVALUATION_SCALARS if isinstance(record, EvaluationRecord) else STEP_SCALARS
            for field, tag in scalars.items():
                self.writer.add_scalar(tag, getattr(record, field), record.step)

    def close(self) -> None:
        if self.writer:
            self.writer.close()
