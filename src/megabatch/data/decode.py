"""From encoded bytes to the pixels of a crop, at its final size.

JPEGs are decoded by libjpeg-turbo (simplejpeg), everything else by Pillow, which has the last word on what
libjpeg-turbo refuses too: what Pillow reads is an image, as for torchvision's ImageFolder.  As there, EXIF orientation
is ignored, transparency is dropped, and grey and CMYK become RGB; but 16 bits of grey become the upper 8 of them.

A crop at least 3 times as large as its target is decoded at a half, a quarter or an eighth of the size, which costs up
to 3 times less (libjpeg scales in the DCT domain; other fractions are slower than no fraction).  The crop is moved by
less than that factor onto whole scaled pixels, so that nothing is shifted by parts of a pixel.  Resizing is torch's
antialiased bilinear filter on uint8, which is Pillow's to 1/255; after scaled decoding the two differ by 0.2 to 1.2 of
255 in the mean of an image, 2.5 at most, since libjpeg averages over boxes (180 crops of photos for each of 6 sizes).
"""

import io
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from megabatch.data.files import Content
from megabatch.data.strips import cut_rows

Pixels = NDArray[np.uint8]  # [H, W, 3]
Lines = NDArray[np.uint8]  # [H, 3 W]: the same
Box = tuple[int, int, int, int]  # top, left, height, width

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")  # others may start other programs
DCT_SCALES = (8, 4, 2)
# A scaled crop is still so much larger than its target: the resizing filter hides libjpeg's.  At 1 the mean deviation
# from Pillow doubles.
LEAST_MARGIN = 1.5
# A thread's pixels lie in memory that it keeps: fresh pages cost a tenth of the time of decoding into them.
MOST_KEPT_BYTES = 64 << 20
KEPT = threading.local()
resize_into: Any = torch._C._nn._upsample_bilinear2d_aa  # what F.interpolate(antialias=True) calls, which has no `out`


class Room(NamedTuple):
    """The same memory twice."""

    bytes: NDArray[np.uint8]
    tensor: torch.Tensor


class Unreadable(Exception):
    """Bytes that are no image, or one that is too large; the text is the reason."""


def read_size(content: Content, max_pixels: int) -> tuple[int, int, bool]:
    """Height, width, and whether libjpeg-turbo can decode it.  Looks at the header only."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        is_jpeg = colours in ("YCbCr", "RGB", "Gray")
    except ValueError:
        with open_with_pillow(content) as image:
            (width, height), is_jpeg = image.size, False
    if height * width > max_pixels:
        raise Unreadable(f"its {width} x {height} pixels are more than data.max_pixels={max_pixels}")
    return height, width, is_jpeg


def decode_crop(
    content: Content, choose_box: Callable[[int, int], Box], size: int, max_pixels: int, colours: str = "RGB"
) -> Lines:
    """The pixels that `choose_box(height, width)` wants, for resizing to `size`; they are valid until the next call."""
    height, width, is_jpeg = read_size(content, max_pixels)
    box = top, _, rows, _ = choose_box(height, width)
    if is_jpeg:
        scale = dct_scale(box, size)
        strips = cut_rows(content, height, top, rows, reach=2 * scale)
        if strips:
            content, height, box = strips.content, strips.height, (top - strips.top, *box[1:])
        pixels, scale = decode_scaled(content, height, width, scale, colours)
    else:
        pixels, scale = decode_with_pillow(content, colours), 1
    top, left, rows, columns = box if scale == 1 else (edge // scale for edge in box)
    return pixels.reshape(len(pixels), -1)[top : top + rows, 3 * left : 3 * (left + columns)]


def dct_scale(box: Box, size: int) -> int:
    """The largest power of two up to 8 by which a crop can be shrunk and stay larger than its target."""
    return next((scale for scale in DCT_SCALES if min(box[2:]) >= LEAST_MARGIN * scale * size), 1)


def decode_scaled(content: Content, height: int, width: int, scale: int, colours: str = "RGB") -> tuple[Pixels, int]:
    """libjpeg-turbo at 1/scale; the scale that was kept to, which is 1 if Pillow had to do it."""
    rows, columns = -(-height // scale), -(-width // scale)
    try:
        pixels = simplejpeg.decode_jpeg(
            content,
            colours,
            min_height=rows,
            min_width=columns,
            min_factor=scale,
            buffer=kept_room("pixels", 3 * rows * columns).bytes,
        )
    except ValueError:  # what it only warns of is an error for simplejpeg
        return decode_with_pillow(content, colours), 1
    assert pixels.shape == (rows, columns, 3), f"decoded to {pixels.shape}, expected {(rows, columns, 3)}"
    return pixels, scale


def kept_room(use: str, count: int) -> Room:
    """At least so many bytes of the calling thread, for one use at a time."""
    room: Room | None = getattr(KEPT, use, None)
    if room is None or len(room.bytes) < count:
        memory = np.empty(count, np.uint8)
        room = Room(memory, torch.from_numpy(memory))
        if count <= MOST_KEPT_BYTES:
            setattr(KEPT, use, room)
    return room


def open_with_pillow(content: Content) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # each of Pillow's formats has errors of its own
        raise Unreadable(reason_of(error, len(content))) from error


def decode_with_pillow(content: Content, colours: str = "RGB") -> Pixels:
    with open_with_pillow(content) as image:
        try:
            pixels = np.asarray(eight_bits(image).convert("RGB"))
            return pixels[:, :, ::-1].copy() if colours == "BGR" else pixels.copy()
        except Unreadable:
            raise
        except Exception as error:
            raise Unreadable(reason_of(error, len(content))) from error


def eight_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 bits as 8; Pillow would make everything above 255 white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unreadable(f"its pixels are of kind {image.mode}, which has no greatest value; make them 8 or 16 bits")
    return image


def reason_of(error: Exception, length: int) -> str:
    if length == 0:
        return "it is empty"
    if isinstance(error, UnidentifiedImageError):
        return "it is no image that Pillow knows"
    return str(error) or type(error).__name__


def resize(lines: Lines, out: torch.Tensor, mirrored: bool = False) -> None:
    """Lines at the size of `out`, uint8 [3, H, W] or [1, 3, H, W], whose memory may lie in any order.

    To be mirrored they come as BGR: a line of it read backwards is a mirrored line of RGB, so that mirroring is part of
    a copy that is made anyway: what torch is given must be contiguous, or it copies it itself, with an OpenMP team.
    """
    height, width = len(lines), lines.shape[1] // 3
    room = kept_room("crop", lines.size)
    np.copyto(room.bytes[: lines.size].reshape(lines.shape), lines[:, ::-1] if mirrored else lines)
    source = room.tensor.as_strided((1, 3, height, width), (lines.size, 1, 3 * width, 3))
    if out.ndim == 3:
        out = out[None]
    if source.shape == out.shape:
        out.copy_(source)
    else:
        resize_into(source, out.shape[2:], False, None, None, out=out)
