"""The classes of samples in tars: text in .cls, or "label" or "cls" in .json, each a number or a name."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from megabatch.data.class_names import LONGEST_NAME, require_names
from megabatch.data.image_files import read_file
from megabatch.data.shapes import MOST_CLASSES
from megabatch.data.tars import Member, Read
from megabatch.errors import UserError
from megabatch.text import is_plain, one_line

CLASSES = "classes.txt"
MOST_LABEL_BYTES = 64_000_000  # of a .json, which may hold much besides the label, or of classes.txt


def read_label(member: Member, extension: str, read: Read, path: Path) -> str | None:
    """An int or a class name, as text; None where a .json says nothing of it."""
    try:
        if member.length > MOST_LABEL_BYTES:
            raise ValueError(f"its {member.length:,} bytes are more than {MOST_LABEL_BYTES:,}")
        content = member.beginning if len(member.beginning) == member.length else read(member.offset, member.length)
        if extension == "cls":
            label: object = content.decode().strip()
        else:
            fields = msgspec.json.decode(content)
            label = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
            if label is None:
                return None
        if isinstance(label, bool) or not isinstance(label, int | str) or label == "" or not is_plain(str(label)):
            raise ValueError(f"{label!r} is neither a number nor a name")
        if len(str(label)) > LONGEST_NAME:
            raise ValueError(f"a name has more than {LONGEST_NAME:,} letters")
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's errors too; and JSON in JSON in JSON
        where = f"{path} at offset {member.offset} ({one_line(member.name)})"
        raise UserError(
            f"{where} is no label: {one_line(str(error))}; expected the number or the name of a class"
        ) from error
    return str(label)


def number_classes(labels: Sequence[str], place: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Class names, and each sample's class.  Where all are numbers they are the classes' numbers."""
    distinct = sorted(set(labels))
    if not all(re.fullmatch(r"-?[0-9]+", label) for label in distinct):
        number_of = {name: number for number, name in enumerate(distinct)}
        return distinct, np.array([number_of[label] for label in labels], np.int64)
    number_of = {label: int(label) for label in distinct}
    lowest, highest = min(number_of.values()), max(number_of.values())
    if lowest < 0 or highest >= MOST_CLASSES:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{place} has a label {wrong}; labels number the classes from 0 to {MOST_CLASSES - 1}")
    return [str(number) for number in range(highest + 1)], np.array([number_of[label] for label in labels], np.int64)


def name_classes(path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of classes.txt for classes that have only numbers, if it has a line for each."""
    if names != tuple(map(str, range(len(names)))) or not path.is_file():
        return names
    lines = tuple(read_file(path, MOST_LABEL_BYTES).decode("utf-8", "replace").splitlines())
    return require_names(lines, str(path)) if len(lines) >= len(names) else names
