"""Prepares an image for a shard: its original bytes, or a smaller JPEG if it is larger than requested."""

import io

import torch
from msgspec import Struct
from PIL import Image

from megabatch.data.pipeline.decode import (
    Unreadable,
    dct_scale,
    decode_scaled,
    decode_with_pillow,
    read_size,
    read_turn,
    resize,
    with_table,
)
from megabatch.data.pipeline.orientation import ORIENTATION, TURNS, UPRIGHT, Pixels, Turn
from megabatch.data.settings import MAX_PIXELS
from megabatch.data.sources.files import Content

SMALLEST_SCALE = 8


class Stored(Struct, frozen=True):
    content: Content
    suffix: str | None  # of the new format; None for the original bytes
    width: int
    height: int


def prepare(content: Content, shorter_side: int | None, quality: int) -> Stored:
    """Return the image to store.  All images are decoded, so that damaged ones are found now and not during a run."""
    height, width, is_jpeg = read_size(content, MAX_PIXELS)
    shorter = min(height, width)
    target = shorter if shorter_side is None else min(shorter, shorter_side)
    # An image that is only checked is decoded at an eighth of its size, the cheapest way that still reads all bytes.
    scale = SMALLEST_SCALE if target == shorter else dct_scale((0, 0, height, width), target)
    pixels = decode_scaled(content, height, width, scale)[0] if is_jpeg else decode_with_pillow(content)
    if target == shorter:
        return Stored(content, None, width, height)
    height, width = shrunk(height, width, target)
    smaller = torch.empty((height, width, 3), dtype=torch.uint8)
    resize(pixels.reshape(len(pixels), -1), smaller.permute(2, 0, 1))
    try:
        encoded = encode(smaller.numpy(), quality, read_turn(content))
    except (ValueError, OSError) as error:
        raise Unreadable(f"its {width} x {height} pixels cannot be stored as a JPEG: {error}") from error
    return Stored(encoded, ".jpg", width, height)


def encode(pixels: Pixels, quality: int, turn: Turn = UPRIGHT) -> bytes:
    """Encode with 4:2:0 in independent strips of 16 rows, which cost about 6 bytes each.

    The EXIF orientation is kept, and nothing else of the original's header.
    """
    file, exif = io.BytesIO(), Image.Exif()
    if turn != UPRIGHT:
        exif[ORIENTATION] = next(number for number, other in TURNS.items() if other == turn)
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1, exif=exif)
    return with_table(file.getvalue())


def shrunk(height: int, width: int, shorter_side: int) -> tuple[int, int]:
    """Return the height and width with the given shorter side, rounded to whole pixels."""
    shorter = min(height, width)
    return round(height * shorter_side / shorter), round(width * shorter_side / shorter)
