"""The settings of a run, as its config.toml has them, by their dotted names; and which of them decide its numbers."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megabatch.errors import UserError
from megabatch.io.toml import NotToml, read_toml
from megabatch.runs import files
from megabatch.runs.reader import is_run, started_in

# What does not change what is computed: sections, and settings.
IRRELEVANT = (
    *("name", "about", "provenance", "run", "checkpoint"),
    *("data.image_timeout_s", "comm.timeout_s", "comm.timeline", "model.compile", "train.examples"),
)
SEED, SOURCE, TARGET = "seed", "data.source", "train.target_top1"
Value = bool | int | float | str | list[Any]  # as in JSON


def is_decisive(key: str) -> bool:
    return not {key, key.partition(".")[0]} & {*IRRELEVANT}


def read_settings(path: Path) -> dict[str, Value]:
    """One line where there is no run, or where its recipe cannot be read."""
    require_run(path)
    config = path / files.CONFIG
    try:
        return dict(flatten(read_toml(config)))
    except (OSError, NotToml) as error:
        raise UserError(f"{config} is damaged ({error}); remove the run, or train it again") from None


def require_run(path: Path) -> None:
    if is_run(path):
        return
    inside = [inner for inner in sorted(path.glob("*/")) if is_run(inner)] if path.is_dir() else []
    remedy = f"give the runs in it: {path}/*" if inside else "`megabatch runs` lists runs"
    raise UserError(f"{path} is no run's folder: {files.CONFIG} is not in it; {remedy}")


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, as_in_json(value)


def as_in_json(value: Any) -> Value:
    """TOML also has dates, inf and nan; no setting of ours is one, but a file may say anything."""
    if isinstance(value, list):
        return [as_in_json(member) for member in value]
    is_plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def is_same(one: Value | None, other: Value | None) -> bool:
    """True is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_same_source(one: Path, one_source: Value | None, other: Path, other_source: Value | None) -> bool:
    """Whether two runs read the same images, though one may name them from another folder."""
    if is_same(one_source, other_source):
        return True
    found = [
        os.path.realpath(started_in(path) / source)
        for path, source in ((one, one_source), (other, other_source))
        if isinstance(source, str) and "\0" not in source and (started_in(path) / source).exists()
    ]
    return len(found) == 2 and found[0] == found[1]
