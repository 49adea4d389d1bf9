"""Images that a CSV file lists: path,label or path,label,split.  Samples are numbered in the order of its rows.

Paths are relative to the folder of the file, or absolute.  Without a column for the split, the header may be missing.
In a multi-label file, a list of labels such as cat;dog is read as the name of a class, and may be empty.
`labels.split_lists` splits it.
"""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.files import Content, EncodedDataset
from megabatch.data.sources.index import once_per_host
from megabatch.data.sources.labels import (
    ALL_TEST_WORDS,
    MAX_NAME_LENGTH,
    SEPARATOR,
    TRAIN_WORDS,
    choose_splits,
    is_split,
    number_classes,
)
from megabatch.errors import LONGEST_QUOTED, UserError
from megabatch.io.arrays import Arrays, Texts, fingerprint
from megabatch.io.reading import MOST_BYTES, NotText, read_file, read_text
from megabatch.text import is_plain, one_line

SUFFIX = ".csv"
HEADERS = (["path", "label"], ["path", "label", "split"])
LONGEST_TABLE = 512 << 20  # bytes, for more than ten million images
LONGEST_PATH = 4096  # characters


class TableFiles:
    """Files by their paths, which are absolute or below `folder`."""

    def __init__(self, folder: str, names: Texts, labels: NDArray[np.int64]) -> None:
        self.folder, self.names, self.labels = folder, names, labels

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        return os.path.join(self.folder, self.names[number])  # noqa: PTH118  # pathlib is slow

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        return read_file(self.path(number), most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        return one_line(self.path(number))

    def name(self, number: int) -> str:
        return self.names[number]

    def fingerprint(self) -> str:
        return fingerprint(self.names.content, self.names.ends, self.labels)


def read_table(path: Path, multi_label: bool = False) -> EncodedDataset:
    path = path.resolve()
    arrays = once_per_host(f"table {path} {multi_label}", lambda: parse_table(path, multi_label))
    parts = [
        TableFiles(str(path.parent), Texts(arrays[f"names_{part}"], arrays[f"ends_{part}"]), arrays[f"labels_{part}"])
        for part in range(int(arrays["num_parts"]))
    ]
    return EncodedDataset(
        class_names=tuple(Texts(arrays["class_names"], arrays["ends_of_names"])),
        train=parts[0],
        test=parts[1] if len(parts) > 1 else None,
        place=str(path),
    )


def parse_table(path: Path, multi_label: bool) -> Arrays:
    names, labels, splits = read_rows(path, multi_label)
    used_splits = choose_splits(sorted({*splits}), path)
    if not used_splits:
        found = "no image" if not names else f"no row of the split {TRAIN_WORDS[0]}"
        raise UserError(f"{path} has {found}; give each image a row with its path and label")
    rows = [at for at, split in enumerate(splits) if split in used_splits]
    chosen = [labels[at] for at in rows]
    arrays: Arrays = {"num_parts": np.array(len(used_splits))}
    class_names, numbers = number_classes(chosen, path)
    texts = Texts.of(class_names)
    arrays["class_names"], arrays["ends_of_names"] = texts.content, texts.ends
    of_row = dict(zip(rows, numbers.tolist(), strict=True))
    for part, split in enumerate(used_splits):
        here = [at for at in rows if splits[at] == split]
        texts = Texts.of(names[at] for at in here)
        arrays[f"names_{part}"], arrays[f"ends_{part}"] = texts.content, texts.ends
        arrays[f"labels_{part}"] = np.array([of_row[at] for at in here], np.int64)
    return arrays


def read_rows(path: Path, multi_label: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the path, label and split of every image."""
    lines: dict[str, int] = {}  # of the paths
    labels, splits = list[str](), list[str]()
    valid_labels, valid_splits = set[str](), {TRAIN_WORDS[0]}
    columns, is_first = 2, True
    for line, cells in read_cells(path):
        place = f"{path}: line {line}"
        if is_first and [cell.lower() for cell in cells] in HEADERS:
            columns, is_first = len(cells), False
            continue
        if is_first and not (len(cells) == 2 and Path(cells[0]).suffix):
            shown = one_line(",".join(cells), LONGEST_QUOTED)
            has_path = len(cells) > 1 and any(Path(cell).suffix for cell in cells)
            remedy = "add it" if has_path else "correct it" if len(cells) > 1 else "separate the columns by commas"
            raise UserError(f"{place} is {shown!r}; expected the header path,label or path,label,split; {remedy}")
        is_first = False
        if len(cells) != columns:
            raise UserError(
                f"{place} has {len(cells)} columns; expected {columns}, separated by commas; quote values with commas"
            )
        name, label, split = cells[0], cells[1], cells[2].lower() if columns == 3 else TRAIN_WORDS[0]
        if not name or len(name) > LONGEST_PATH or not (name.isprintable() or is_plain(name)):
            raise UserError(f"{place} has no valid path; expected 1 to {LONGEST_PATH:,} plain characters; correct it")
        if lines.setdefault(name, line) != line:
            remedy = f"separate its labels by {SEPARATOR}" if multi_label else "remove one of them"
            raise UserError(f"{place}: {one_line(name, LONGEST_QUOTED)} is also on line {lines[name]}; {remedy}")
        if label not in valid_labels:
            require_label(label, place, multi_label)
            valid_labels.add(label)
        if split not in valid_splits:
            require_split(split, place)
            valid_splits.add(split)
        labels.append(label or SEPARATOR)
        splits.append(split)
    return list(lines), labels, splits


def require_split(split: str, place: str) -> None:
    if not is_split(split, (*TRAIN_WORDS, *ALL_TEST_WORDS)):
        shown = one_line(split, LONGEST_QUOTED)
        raise UserError(f"{place} has the split {shown!r}; expected train, val or test; correct it")


def require_label(label: str, place: str, multi_label: bool) -> None:
    for name in label.split(SEPARATOR) if multi_label else [label]:
        if (not name and not multi_label) or len(name) > MAX_NAME_LENGTH or not is_plain(name):
            shown = one_line(name, LONGEST_QUOTED)
            remedy = f"give it one, or, if an image may have several labels or none, {SEPARATOR}"
            remedy = "correct it" if name else remedy
            raise UserError(
                f"{place} has the label {shown!r}; expected 1 to {MAX_NAME_LENGTH:,} characters without control "
                f"characters; {remedy}"
            )


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of every line that is not empty."""
    try:
        text = read_text(path, LONGEST_TABLE)
    except NotText as error:
        raise UserError(f"{path}: {error}; save it as CSV in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}; check its quotes") from None
