"""EXIF orientation: cameras store images as the sensor reads them, with a number from 1 to 8 for how to turn them.

With `data.exif_orientation` images are turned as Pillow's `ImageOps.exif_transpose` does.  Only the crop is turned: a
box of the upright image is mapped to the stored image, decoded, and then transposed and mirrored.  Pillow itself turns
TIFFs, with or without the setting.
"""

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.files import Content

Box = tuple[int, int, int, int]  # top, left, height, width
Pixels = NDArray[np.uint8]  # [H, W, 3]

NAME = b"Exif\0\0"
APP1, START_OF_SCAN, FRAMES = 0xE1, 0xDA, range(0xC0, 0xD0)
MOST_SEGMENTS, MOST_TAGS = 100, 1000  # that are parsed; a file has about 10 and 20
ORIENTATION = 0x0112
SHORT, LONG = 3, 4


class Turn(NamedTuple):
    """How a stored image becomes upright: transposed first, then mirrored."""

    transposes: bool = False
    mirrors_rows: bool = False  # top and bottom change places
    mirrors_columns: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the upright image."""
        return (width, height) if self.transposes else (height, width)

    def stored(self, box: Box, height: int, width: int) -> Box:
        """Return the place in the stored image of a box of the upright image, which has this height and width."""
        top, left, rows, columns = box
        if self.mirrors_rows:
            top = height - top - rows
        if self.mirrors_columns:
            left = width - left - columns
        return (left, top, columns, rows) if self.transposes else (top, left, rows, columns)

    def upright(self, pixels: Pixels) -> Pixels:
        turned = pixels.swapaxes(0, 1) if self.transposes else pixels
        turned = turned[::-1] if self.mirrors_rows else turned
        return np.ascontiguousarray(turned[:, ::-1] if self.mirrors_columns else turned)


UPRIGHT = Turn()
TURNS = {
    1: UPRIGHT,
    2: Turn(mirrors_columns=True),
    3: Turn(mirrors_rows=True, mirrors_columns=True),
    4: Turn(mirrors_rows=True),
    5: Turn(transposes=True),
    6: Turn(transposes=True, mirrors_columns=True),
    7: Turn(transposes=True, mirrors_rows=True, mirrors_columns=True),
    8: Turn(transposes=True, mirrors_rows=True),
}


def jpeg_exif(content: Content) -> bytes:
    """Return the EXIF data in the header of a JPEG, or b""."""
    place = 2
    for _ in range(MOST_SEGMENTS):
        head = bytes(content[place : place + 4])
        if len(head) < 4 or head[0] != 0xFF or head[1] == START_OF_SCAN or head[1] in FRAMES:
            break
        length = int.from_bytes(head[2:])
        if head[1] == APP1 and bytes(content[place + 4 : place + 4 + len(NAME)]) == NAME:
            return bytes(content[place + 4 : place + 2 + length])
        place += 2 + length
    return b""


def find_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data: 1, upright, if it has none or is damaged."""
    exif = exif.removeprefix(NAME)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for number in range(min(count, MOST_TAGS)):
            tag, kind = struct.unpack_from(f"{order}HH", exif, start + 2 + 12 * number)
            if tag == ORIENTATION and kind in (SHORT, LONG):
                (value,) = struct.unpack_from(order + ("H" if kind == SHORT else "I"), exif, start + 10 + 12 * number)
                return value if value in TURNS else 1
    except struct.error:
        pass
    return 1
