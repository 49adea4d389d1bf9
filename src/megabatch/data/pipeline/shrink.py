"""An image as it goes into a shard: its own bytes, or, where it is larger than asked for, a smaller JPEG."""

import io

import torch
from msgspec import Struct
from PIL import Image

from megabatch.data.pipeline.decode import (
    Pixels,
    Unreadable,
    dct_scale,
    decode_scaled,
    decode_with_pillow,
    read_size,
    resize,
    with_table,
)
from megabatch.data.settings import MAX_PIXELS
from megabatch.data.sources.files import Content

SMALLEST_SCALE = 8


class Stored(Struct, frozen=True):
    content: Content
    suffix: str | None  # of the new format, None where the bytes are the source's own
    width: int
    height: int


def prepare(content: Content, shorter_side: int | None, quality: int) -> Stored:
    """Decodes every image, also those that stay as they are: a damaged one is found now, not in the middle of a run."""
    height, width, is_jpeg = read_size(content, MAX_PIXELS)
    shorter = min(height, width)
    target = shorter if shorter_side is None else min(shorter, shorter_side)
    # An image that is only looked at is decoded at an eighth: the cheapest way that still reads all of the bytes.
    scale = SMALLEST_SCALE if target == shorter else dct_scale((0, 0, height, width), target)
    pixels = decode_scaled(content, height, width, scale)[0] if is_jpeg else decode_with_pillow(content)
    if target == shorter:
        return Stored(content, None, width, height)
    height, width = shrunk(height, width, target)
    smaller = torch.empty((height, width, 3), dtype=torch.uint8)
    resize(pixels.reshape(len(pixels), -1), smaller.permute(2, 0, 1))
    try:
        encoded = encode(smaller.numpy(), quality)
    except (ValueError, OSError) as error:
        raise Unreadable(f"its {width} x {height} pixels cannot be a JPEG: {error}") from error
    return Stored(encoded, ".jpg", width, height)


def encode(pixels: Pixels, quality: int) -> bytes:
    """4:2:0, in strips that can be decoded alone, which costs some 6 bytes for 16 rows."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return with_table(file.getvalue())


def shrunk(height: int, width: int, shorter_side: int) -> tuple[int, int]:
    """The same shape, to whole pixels."""
    shorter = min(height, width)
    return round(height * shorter_side / shorter), round(width * shorter_side / shorter)
