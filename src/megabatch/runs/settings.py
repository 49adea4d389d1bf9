"""The settings of a run by dotted name, read from config.toml, and which of them affect its results."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megabatch.errors import UserError
from megabatch.io.toml import NotToml, read_toml
from megabatch.runs import files
from megabatch.runs.reader import is_run, started_in

# Sections and settings that do not affect the results.
IRRELEVANT = (
    *("name", "about", "provenance", "run", "checkpoint"),
    *(
        "data.image_timeout_s",
        "comm.timeout_s",
        "comm.timeline",
        "model.compile",
        "model.cuda_graphs",
        "train.examples",
        "train.noise_every",
    ),
)
SEED, SOURCE, TARGET = "seed", "data.source", "train.target_top1"
Value = bool | int | float | str | list[Any]  # as in JSON


def is_decisive(key: str) -> bool:
    return not {key, key.partition(".")[0]} & {*IRRELEVANT}


def read_settings(path: Path) -> dict[str, Value]:
    """Return the settings of a run; raise UserError if the folder is not a run or its config is damaged."""
    require_run(path)
    config = path / files.CONFIG
    try:
        return dict(flatten(read_toml(config)))
    except (OSError, NotToml) as error:
        raise UserError(f"{config} is damaged ({error}); delete the run or train it again") from None


def require_run(path: Path) -> None:
    if is_run(path):
        return
    inside = [inner for inner in sorted(path.glob("*/")) if is_run(inner)] if path.is_dir() else []
    remedy = f"pass the runs in it: {path}/*" if inside else "`megabatch runs` lists runs"
    raise UserError(f"{path} is not a run's folder: it has no {files.CONFIG}; {remedy}")


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, as_in_json(value)


def as_in_json(value: Any) -> Value:
    """Convert TOML's dates, inf and nan to text.  No setting has such a value, but a file may contain them."""
    if isinstance(value, list):
        return [as_in_json(member) for member in value]
    is_plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def is_same(one: Value | None, other: Value | None) -> bool:
    """Compare two values; True is not equal to 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_same_source(one: Path, one_source: Value | None, other: Path, other_source: Value | None) -> bool:
    """Return whether two runs read the same images, even if their paths are relative to different folders."""
    if is_same(one_source, other_source):
        return True
    found = [
        os.path.realpath(started_in(path) / source)
        for path, source in ((one, one_source), (other, other_source))
        if isinstance(source, str) and "\0" not in source and (started_in(path) / source).exists()
    ]
    return len(found) == 2 and found[0] == found[1]
