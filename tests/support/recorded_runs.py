"""Run folders with invented records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megabatch.runs.folder import RunFolder
from megabatch.runs.records import EvaluationRecord, Record, Status, StepTimes
from megabatch.runs.totals import RunTotals
from tests.support.records import step_record

BATCH, TARGET = 128, 0.9


def config_of(seed: int, changes: Mapping[str, Any]) -> str:
    """Return a recipe with settings changed by their dotted names; None removes a setting."""
    tables: dict[str, Any] = {
        "name": "smoke",
        "seed": seed,
        "data": {"source": "synthetic", "image_timeout_s": 120},
        "batch": {"global": BATCH, "micro": 32},
        "optim": {"name": "sgd", "learning_rate": 0.1, "decay_all": False},
        "train": {"epochs": 2.0, "target_top1": TARGET},
        "run": {"device": "auto"},
    }
    for key, value in changes.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
        if value is None:
            del table[name]
    return msgspec.toml.encode(tables).decode()


def records_of(top1s: Sequence[float]) -> list[Record]:
    """Return two steps and an evaluation for each accuracy; each takes a second."""
    records: list[Record] = []
    for number, top1 in enumerate(top1s):
        for step in (2 * number + 1, 2 * number + 2):
            waits = {"data_wait_s": 0.1, "comm_wait_s": 0.2}
            changes = {"images_per_s": 100.0 * step, "wall_s": float(step + number)} | waits
            late = {"straggler": 1, "straggler_delay_s": 0.04}
            records.append(msgspec.structs.replace(step_record(step, step / 2, 1.0), **changes, **late))
        records.append(
            EvaluationRecord(
                step=2 * number + 2,
                epoch=number + 1.0,
                top1=top1,
                top5=1.0,
                test_loss=0.5,
                class_top1=[],
                samples_evaluated=10,
                wall_s=3.0 * (number + 1),
                times=StepTimes(),
            )
        )
    return records


def record_run(
    path: Path,
    *top1s: float,
    seed: int = 1,
    status: Status | None = "finished",
    environment: Mapping[str, object] | None = None,
    **settings: Any,
) -> Path:
    """Write a run folder.  Names of settings have __ for dots.  Without a status the run was killed."""
    totals = RunTotals(global_batch=BATCH, target_top1=TARGET)
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    with RunFolder(path) as folder:
        folder.begin(config_of(seed, changes), environment or {}, step=0)
        for record in records_of(top1s):
            folder.write(record)
            totals.add(record, record.wall_s)
        if status:
            folder.finish(totals.summary(status))
    return path
