"""Small models of photos, trained in the test's process."""

from pathlib import Path

from megabatch.config.loading import load_config
from megabatch.ranks.world import current_rank
from megabatch.training.prepare import prepare
from megabatch.training.run import train_and_record

SMALL = [
    "model.name=small_cnn",
    "model.options.width=4",
    "data.image_size=24",
    "data.validation=0.3",
    "batch.global=8",
    "batch.micro=4",
    "optim.learning_rate=0.05",
    "schedule.warmup_epochs=0.5",
    "run.threads=1",
]


def train_photos(folder: Path, *overrides: str) -> Path:
    config = load_config("photos", [*SMALL, f"run.dir={folder}", *overrides])
    with prepare(config, current_rank(), resume="auto") as ready:
        train_and_record(ready.config, ready.start, ready.training)
    return folder
