"""How large encoded images are, as they are stored: from the headers of a few."""

import numpy as np

from megabatch.data.decode import Unreadable, read_size
from megabatch.data.files import EncodedFiles

LOOKED_AT = 50  # images, evenly spread, as a set may be sorted


def median_side(files: EncodedFiles, max_pixels: int) -> float | None:
    """Of their shorter sides; None where none can be read."""
    sides = []
    for number in np.linspace(0, len(files) - 1, LOOKED_AT, dtype=np.int64).tolist():
        try:
            sides.append(min(read_size(files.content(number), max_pixels)[:2]))
        except (OSError, Unreadable):
            continue
    return float(np.median(sides)) if sides else None
