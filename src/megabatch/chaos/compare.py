"""Two runs of one recipe, to the bit: weights, the last checkpoint, every row, and the summary; not their times."""

import json
import struct
from pathlib import Path
from typing import Any

from megabatch.runs.files import CHECKPOINTS, METRICS, SUMMARY, WEIGHTS
from megabatch.train.checkpoint import STATE
from megabatch.train.saves import LAST

# Of a row: what clocks and memory say.  All other fields count, also those that are yet to come.
TIMES = ("data_wait", "straggler", "times")
TIME_SUFFIXES = ("_s", "_mb")
SUMMED_UP = ("status", "steps", "skipped_steps", "top1", "top5", "best_top1", "test_loss", "samples_evaluated")

Tensor = tuple[str, list[int], bytes]  # type, shape, content


def differences(expected: Path, found: Path) -> list[str]:
    """In what a run's folder is not that of the `expected` one: a line each."""
    return [
        *compare_tensors(expected, found, Path(WEIGHTS)),
        *compare_tensors(expected, found, Path(CHECKPOINTS) / LAST / STATE),
        *compare_rows(expected / METRICS, found / METRICS),
        *compare_summaries(expected / SUMMARY, found / SUMMARY),
    ]


def compare_tensors(expected: Path, found: Path, name: Path) -> list[str]:
    try:
        theirs, ours = read_tensors(expected / name), read_tensors(found / name)
    except (OSError, ValueError, struct.error) as error:
        return [f"{name} cannot be read ({error})"]
    wrong = [tensor for tensor in sorted(theirs.keys() | ours.keys()) if theirs.get(tensor) != ours.get(tensor)]
    return [f"{name}: {len(wrong)} of {len(theirs)} tensors differ, first {wrong[0]}"] if wrong else []


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Of a safetensors file, without its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            if end > len(content):
                raise ValueError(f"{name} is cut off")
            tensors[name] = (about["dtype"], about["shape"], content[begin:end])
    return tensors


def compare_rows(expected: Path, found: Path) -> list[str]:
    try:
        theirs, ours = read_rows(expected), read_rows(found)
    except (OSError, ValueError) as error:
        return [f"{METRICS} cannot be read ({error})"]
    for number, (their, our) in enumerate(zip(theirs, ours, strict=False), 1):
        wrong = [key for key in sorted(their.keys() | our.keys()) if their.get(key) != our.get(key)]
        if wrong:
            key = wrong[0]
            return [f"{METRICS}, row {number}: {key} is {our.get(key)}, and undisturbed {their.get(key)}"]
    return [f"{METRICS} has {len(ours)} rows, and undisturbed {len(theirs)}"] if len(theirs) != len(ours) else []


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not is_time(key)} for row in rows]


def is_time(key: str) -> bool:
    return key in TIMES or key.endswith(TIME_SUFFIXES)


def compare_summaries(expected: Path, found: Path) -> list[str]:
    try:
        theirs, ours = (json.loads(path.read_text()) for path in (expected, found))
    except (OSError, ValueError) as error:
        return [f"{SUMMARY} cannot be read ({error})"]
    return [
        f"{SUMMARY}: {key} is {ours.get(key)}, and undisturbed {theirs.get(key)}"
        for key in SUMMED_UP
        if theirs.get(key) != ours.get(key)
    ]
