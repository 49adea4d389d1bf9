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
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from megabatch.data.sources.files import Content
from megabatch.torch_api import resize_antialiased

# How many scans a JPEG has: each is a pass over all of its pixels, and ten bytes are enough for one.
#
# 64 megapixels with some thousand empty scans are a file of 400 KB that takes libjpeg minutes.  Encoders write 1
# scan, or about 10 of a progressive JPEG; libjpeg-turbo's own fuzzers stop at 500.

MOST_SCANS = 500
MOST_SCANNED = 1 << 31  # pixels times scans: 24 scans of the largest image that data.max_pixels lets in by default
MOST_SEGMENTS = 100  # that are walked through; a header has about 10
SCAN = b"\xff\xda"
START_OF_IMAGE, SEQUENTIAL, START_OF_SCAN = b"\xff\xd8", (0xC0, 0xC1), 0xDA
# Of frames of other kinds, and what has no length: fill bytes, restarts, the beginning and the end of an image.
OTHERS = frozenset([0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xDA), 0x00, 0x01, 0xFF])


def count_scans(content: Content) -> int:
    """The scans of a JPEG, or more: behind a sequential header with all colours in one scan, libjpeg takes no other.

    Elsewhere markers are counted without parsing: compressed data has none, a thumbnail in the header may have some.
    """
    return 1 if has_one_scan(content) else bytes(content).count(SCAN)


def has_one_scan(content: Content) -> bool:
    place, components = len(START_OF_IMAGE), 0
    try:
        for _ in range(MOST_SEGMENTS):
            marker = content[place + 1]
            if marker == START_OF_SCAN:
                return 0 < components == content[place + 4]
            if content[place] != 0xFF or marker in OTHERS:
                return False
            if marker in SEQUENTIAL:
                components = content[place + 9]
            place += 2 + (content[place + 2] << 8) + content[place + 3]
    except IndexError:
        pass
    return False


def are_too_many(scans: int, pixels: int) -> bool:
    return scans > MOST_SCANS or (scans > 1 and scans * pixels > MOST_SCANNED)


# Cuts a JPEG to the rows that a crop needs, so that the others are not decoded.
#
# Every block of a JPEG is coded against the one before it, but behind a restart marker coding starts afresh.
# `megabatch pack` writes one behind every row of blocks, and a table of where these strips begin into the header (as
# a segment that other readers pass over).  Then a JPEG of some strips is a copy of the header with another height, of
# their bytes, and their markers counted from 0.  A random crop has 0.67 of the height in the mean, so a quarter of
# the decoding is saved. Pixels are those of the whole image, bit for bit: strips that colours are interpolated from
# are kept.

START = 20  # of the table: behind the segment with which every JFIF file begins
MARKER, NAME = b"\xff\xe9", b"megabatch\0"
HEAD = struct.Struct(">HHHH")  # rows of pixels in a strip, height, strips, where the header of the frame begins
HEAD_AT = START + 4 + len(NAME)
TABLE_AT = HEAD_AT + HEAD.size
FRAME = 0xC0
RESTARTS, END = [bytes([0xFF, 0xD0 + number]) for number in range(8)], b"\xff\xd9"


class Strips(NamedTuple):
    content: bytearray  # a JPEG
    top: int  # the row of the whole image that is its first
    height: int


def cut_rows(content: Content, height: int, top: int, rows: int, reach: int) -> Strips | None:
    """The strips in which these rows lie, and `reach` more on both sides; None where that is all, or has no table.

    From half as many rows of colours, one more is interpolated with: 2 rows of pixels, at a scale of 1/s 2 s of them.
    A table that does not fit its image (some programs keep what they do not know) is as good as none.
    """
    if content[START + 4 : HEAD_AT] != NAME:
        return None
    try:
        strip, of_height, count, frame = HEAD.unpack_from(content, HEAD_AT)
        starts = struct.unpack_from(f">{count + 1}I", content, TABLE_AT)
    except struct.error:
        return None
    scan, is_of_this = starts[0], of_height == height and strip in (8, 16) and count == -(-height // strip)
    has_scan = any(content[scan - length : scan - length + 2] == b"\xff\xda" for length in (10, 14))  # grey, or colours
    if not is_of_this or not has_scan or content[frame : frame + 2] != b"\xff\xc0":
        return None
    first = max(0, top - reach) // strip
    last = min(count, -(-(top + rows + reach) // strip))
    begin, end = starts[first], starts[last]
    if last - first == count or not scan <= begin < end <= len(content):
        return None
    if first and content[begin - 2 : begin] != RESTARTS[(first - 1) % 8]:
        return None
    cut = bytearray(content[:scan])
    cut += content[begin:end]
    new_height = min(height, last * strip) - first * strip
    cut[frame + 5 : frame + 7] = new_height.to_bytes(2)
    for number in range(first + 1, last + 1):
        place = scan + starts[number] - begin - 2
        expected = END if number == count else RESTARTS[(number - 1) % 8]
        if cut[place : place + 2] != expected:
            return None
        cut[place : place + 2] = END if number == last else RESTARTS[(number - first - 1) % 8]
    return Strips(cut, first * strip, new_height)


def with_table(content: bytes) -> bytes:
    """A baseline JPEG that has a restart marker behind every row of blocks, with the table of its strips."""
    segments = dict(walk_segments(content))
    frame, scan = segments[FRAME], segments[START_OF_SCAN]
    _, _, height, _, components = struct.unpack_from(">HBHHB", content, frame + 2)
    down = max(content[frame + 11 + 3 * number] & 15 for number in range(components))
    begin = scan + 2 + int.from_bytes(content[scan + 2 : scan + 4])
    ends = [found.end() for found in re.finditer(rb"\xff[\xd0-\xd7\xd9]", content[begin:])]
    starts = [0, *ends]
    assert len(starts) == 1 + -(-height // (8 * down)), "a restart marker is not behind a row of blocks"
    room = TABLE_AT + 4 * len(starts) - START
    table = [begin + room + start for start in starts]
    head = HEAD.pack(8 * down, height, len(starts) - 1, frame + room)
    segment = MARKER + (room - 2).to_bytes(2) + NAME + head + struct.pack(f">{len(table)}I", *table)
    return content[:START] + segment + content[START:]


def walk_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Marker and place of each, up to the scan."""
    marker, place = 0, 2
    while marker != START_OF_SCAN:
        marker = content[place + 1]
        yield marker, place
        place += 2 + int.from_bytes(content[place + 2 : place + 4])


Pixels = NDArray[np.uint8]  # [H, W, 3]
Lines = NDArray[np.uint8]  # [H, 3 W]: the same
Box = tuple[int, int, int, int]  # top, left, height, width

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")  # others may start other programs
# Each of Pillow's formats has errors of its own.  Its plugins raise the first row on purpose; the second is what their
# parsing of damaged headers comes to (short reads, tables that are looked up, offsets beyond any integer of C); then
# what its decoders and its guard against decompression bombs say, and its warnings, where Python is to raise them.
PILLOW_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError),
    *(struct.error, LookupError, TypeError, ArithmeticError),
    *(zlib.error, MemoryError, Image.DecompressionBombError, Warning),
)
# Its warning of such images is ours to give: they are refused by data.max_pixels, or it allows them.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)
# Bytes, or pixels, of what Pillow decodes in Python (BMP in runs, PPM in digits or not of 8 bits): a second or two.
MOST_SLOW = 2_000_000
FREE_READS, BYTES_A_READ = 50_000, 1024  # a PNG takes three for 8 KB
LONGEST_SIDE = 1 << 20  # Pillow keeps a pointer to each row, and one of 89 million rows of 1 pixel takes 7 seconds
BAND_PIXELS = 1 << 22
TILE_WIDTH, TILE_HEIGHT = 322, 323  # tags of a TIFF
MOST_TILE_PIXELS = 1 << 22
DCT_SCALES = (8, 4, 2)
# A scaled crop is still so much larger than its target: the resizing filter hides libjpeg's.  At 1 the mean deviation
# from Pillow doubles.
LEAST_MARGIN = 1.5
# A thread's pixels lie in memory that it keeps: fresh pages cost a tenth of the time of decoding into them.
MOST_KEPT_BYTES = 64 << 20
KEPT = threading.local()


class Room(NamedTuple):
    """The same memory twice."""

    bytes: NDArray[np.uint8]
    tensor: torch.Tensor


class Unreadable(Exception):
    """Bytes that are no image, or one that is too large; the text is the reason."""


class TooLate(Unreadable):
    """An image that is still being read or decoded, or that was never done with."""


class Metered(io.BytesIO):
    """An image for Pillow, whose plugins go through headers in Python, chunk by chunk, or byte by byte where there are
    none: 20 MB of empty segments would take 10 seconds.  A file may have some, but not be made of nothing else."""

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self.left = FREE_READS + len(content) // BYTES_A_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("it has more parts than an image has, and nearly nothing in them")
        return super().read(size)


def read_size(content: Content, max_pixels: int) -> tuple[int, int, bool]:
    """Height, width, and whether libjpeg-turbo can decode it.  Looks at the header only."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        is_jpeg = colours in ("YCbCr", "RGB", "Gray")
    except ValueError:
        with open_with_pillow(content) as image:
            (width, height), is_jpeg = image.size, False
    if max(height, width) > LONGEST_SIDE:
        raise Unreadable(f"its {width} x {height} pixels are longer than {LONGEST_SIDE:,}")
    if height * width > max_pixels:
        raise Unreadable(f"its {width} x {height} pixels are more than data.max_pixels={max_pixels}")
    if content[:2] == START_OF_IMAGE and are_too_many(scans := count_scans(content), height * width):
        raise Unreadable(f"its {scans:,} scans of {width} x {height} pixels are more than any encoder writes")
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
        return Image.open(Metered(content), formats=FORMATS)
    except PILLOW_ERRORS as error:
        raise Unreadable(reason_of(error, len(content))) from error


def decode_with_pillow(content: Content, colours: str = "RGB") -> Pixels:
    """The first frame of an animation."""
    with open_with_pillow(content) as image:
        require_cheap(image, len(content))
        try:
            pixels = to_rgb(eight_bits(image))
        except PILLOW_ERRORS as error:
            raise Unreadable(reason_of(error, len(content))) from error
        return np.ascontiguousarray(pixels[:, :, ::-1]) if colours == "BGR" else pixels


def to_rgb(image: Image.Image) -> Pixels:
    """In bands where it is large: converting and copying a whole image takes four times the memory of its pixels."""
    rows = max(1, BAND_PIXELS // image.width)
    if image.height <= rows:
        return np.asarray(image.convert("RGB"))
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(image.height, top + rows)))
        pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels


def require_cheap(image: Image.Image, length: int) -> None:
    """What an image says of itself besides its size, by which a small one could take minutes or gigabytes."""
    pixels = image.width * image.height
    decoders = {tile[0] for tile in getattr(image, "tile", ())}
    if decoders & {*Image.DECODERS} and max(pixels, length) > MOST_SLOW:
        raise Unreadable(
            f"its {image.width} x {image.height} pixels in {length:,} bytes are of a kind of {image.format} that is "
            f"read slowly, for which {MOST_SLOW:,} of either are too many; store it as a PNG"
        )
    tags = getattr(image, "tag_v2", {})  # of a TIFF, whose decoder takes memory for a whole tile
    tile_width, tile_height = (tags.get(tag, 0) for tag in (TILE_WIDTH, TILE_HEIGHT))
    if tile_width * tile_height > max(pixels, MOST_TILE_PIXELS):
        raise Unreadable(f"its tiles of {tile_width} x {tile_height} pixels are larger than itself")


def eight_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 bits as 8; Pillow would make everything above 255 white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unreadable(f"its pixels are of kind {image.mode}, which has no greatest value; make them 8 or 16 bits")
    return image


def reason_of(error: Exception | Warning, length: int) -> str:
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
        resize_antialiased(source, out.shape[2:], False, None, None, out=out)
