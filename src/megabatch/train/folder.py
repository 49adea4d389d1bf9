"""The run's folder: config.toml, metrics.jsonl, summary.json."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from megabatch.config import RunConfig
from megabatch.errors import UserError
from megabatch.train.records import Record, Summary


class RunFolder:
    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        (path / "config.toml").write_text(config.to_toml())
        self.metrics = (path / "metrics.jsonl").open("wb")

    @classmethod
    def create(cls, config: RunConfig, recipe: str) -> Self:
        return cls(make_folder(config.run.dir, recipe), config)

    def write(self, record: Record) -> None:
        """One row, flushed: what has happened is on disk before the next step begins."""
        self.metrics.write(msgspec.json.encode(record) + b"\n")
        self.metrics.flush()

    def finish(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (self.path / "summary.json").write_bytes(text + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.metrics.close()


def make_folder(wanted: str | None, recipe: str) -> Path:
    """The folder that the recipe names, or the next free runs/<recipe>-<nnn>."""
    if wanted is not None:
        path = Path(wanted)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"run.dir={wanted!r} exists and is not an empty folder; give a new one, or leave it out")
        path.mkdir(parents=True, exist_ok=True)
        return path
    taken = [int(path.name.rpartition("-")[2]) for path in Path("runs").glob(f"{recipe}-[0-9][0-9][0-9]")]
    for number in range(max(taken, default=0) + 1, 1000):
        path = Path("runs") / f"{recipe}-{number:03d}"
        with contextlib.suppress(FileExistsError):  # another run was faster
            path.mkdir(parents=True)
            return path
    raise UserError(f"runs/{recipe}-999 exists; remove old runs, or give run.dir")
