"""Decodes images to the pixels of a crop at its final size.

JPEGs are decoded by libjpeg-turbo (simplejpeg), other formats by Pillow.  Pillow also gets the JPEGs that libjpeg-turbo
refuses, so any file that Pillow reads is an image, as in torchvision's ImageFolder.  As there, EXIF orientation is
ignored by default, transparency is dropped, and grey and CMYK become RGB.  Unlike there, 16-bit grey keeps its upper
8 bits.

Scaled decoding: A crop at least 3 times as large as its target is decoded at a half, a quarter or an eighth of the
size, which costs up to 3 times less (libjpeg scales in the DCT domain; other fractions are slower than full size).
The crop is moved by less than that factor onto whole scaled pixels, so nothing is shifted by fractions of a pixel.
Resizing is torch's antialiased bilinear filter on uint8, which agrees with Pillow's to 1/255.  After scaled decoding
the two differ by 0.2 to 1.2 of 255 in the mean of an image, at most by 2.5, because libjpeg averages over boxes (180
crops of photos for each of 6 sizes).

Scans: Each scan of a JPEG is a pass over all pixels, and ten bytes are enough for one.  A file of 400 KB with 64
megapixels and a few thousand empty scans takes libjpeg minutes.  Encoders write 1 scan, or about 10 in a progressive
JPEG; libjpeg-turbo's fuzzers stop at 500.

Strips: Only the rows of a crop are decoded.  Each block of a JPEG is coded relative to the previous one, but coding
restarts after a restart marker.  `megabatch pack` writes a marker after every row of blocks, and a table of the
offsets of these strips into the header, in a segment that other readers ignore.  A JPEG of some strips is then a copy
of the header with another height, the bytes of the strips, and their markers renumbered from 0.  A random crop covers
0.67 of the height on average, so this saves a quarter of the decoding.  The pixels are bitwise identical to those of
the whole image, because strips that colours are interpolated from are included.
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
from PIL import AvifImagePlugin, Image, UnidentifiedImageError

from megabatch.data.pipeline.orientation import TURNS, UPRIGHT, Box, Pixels, Turn, find_orientation, jpeg_exif
from megabatch.data.sources.files import Content
from megabatch.torch_api import resize_antialiased

MOST_SCANS = 500
MOST_SCANNED = 1 << 31  # pixels times scans: 24 scans of the largest image that data.max_pixels allows by default
MOST_SEGMENTS = 100  # that are parsed; a header has about 10
SCAN = b"\xff\xda"
START_OF_IMAGE, SEQUENTIAL, START_OF_SCAN = b"\xff\xd8", (0xC0, 0xC1), 0xDA
# Markers of other frames, and markers without a length: fill bytes, restarts, start and end of an image.
OTHERS = frozenset([0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xDA), 0x00, 0x01, 0xFF])

START = 20  # offset of the table: after the first segment of every JFIF file
MARKER, NAME = b"\xff\xe9", b"megabatch\0"
HEAD = struct.Struct(">HHHH")  # rows of pixels per strip, height, number of strips, offset of the frame header
HEAD_AT = START + 4 + len(NAME)
TABLE_AT = HEAD_AT + HEAD.size
FRAME = 0xC0
RESTARTS, END = [bytes([0xFF, 0xD0 + number]) for number in range(8)], b"\xff\xd9"

Lines = NDArray[np.uint8]  # [H, 3 W]: the same

# Readers of other formats may start other programs.  Pillow reads AVIF if it was built with libavif.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", *["AVIF"] * AvifImagePlugin.SUPPORTED)
# Pillow's plugins raise the first row on purpose, and the second when they parse damaged headers (short reads, failed
# lookups, offsets that overflow C integers).  The third row is from its decoders, its guard against decompression
# bombs, and its warnings if Python is set to raise them.
PILLOW_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError),
    *(struct.error, LookupError, TypeError, ArithmeticError),
    *(zlib.error, MemoryError, Image.DecompressionBombError, Warning),
)
# data.max_pixels decides which images are too large, so Pillow's warning is redundant.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)
# Bytes or pixels of an image that Pillow decodes in Python (run-length BMP, PPM in digits or not 8-bit): 1 or 2 s.
MOST_SLOW = 2_000_000
FREE_READS, BYTES_PER_READ = 50_000, 1024  # a PNG takes three reads for 8 KB
LONGEST_SIDE = 1 << 20  # Pillow stores a pointer per row; an image of 89 million rows of 1 pixel takes 7 s
BAND_PIXELS = 1 << 22
TILE_WIDTH, TILE_HEIGHT = 322, 323  # tags of a TIFF
MOST_TILE_PIXELS = 1 << 22
DCT_SCALES = (8, 4, 2)
# A scaled crop is larger than its target by at least this factor, so that the resizing filter dominates libjpeg's.
# With 1, the mean deviation from Pillow doubles.
LEAST_MARGIN = 1.5
# Each thread keeps its pixel buffers: page faults of new memory cost a tenth of the decoding time.
MOST_BUFFER_BYTES = 64 << 20
BUFFERS = threading.local()


class Buffer(NamedTuple):
    """The same memory as an array and as a tensor."""

    bytes: NDArray[np.uint8]
    tensor: torch.Tensor


class Unreadable(Exception):
    """Error for bytes that are not an image, or for an image that is too large, with the reason."""


class TimedOut(Unreadable):
    """Error for an image whose reading or decoding exceeded the time limit."""


class BoundedReads(io.BytesIO):
    """A file for Pillow with a limited number of reads.

    Pillow's plugins parse headers in Python, chunk by chunk or byte by byte: 20 MB of empty segments would take 10 s.
    """

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self.left = FREE_READS + len(content) // BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("it consists of too many tiny segments")
        return super().read(size)


def count_scans(content: Content) -> int:
    """Return the number of scans of a JPEG, or an upper bound.

    After a sequential header with all colours in one scan, libjpeg reads no other scan.  Otherwise markers are counted
    without parsing: compressed data contains none, but a thumbnail in the header may.
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


class Strips(NamedTuple):
    content: bytearray  # a JPEG
    top: int  # its first row in the whole image
    height: int


def cut_rows(content: Content, height: int, top: int, rows: int, reach: int) -> Strips | None:
    """Return the strips with these rows and `reach` more on both sides, or None to decode the whole image.

    There are half as many rows of colours, and one more of them is used for interpolation: 2 rows of pixels, or 2 s at
    a scale of 1/s.  A table that does not match its image is ignored: some programs copy segments they do not know.
    """
    if content[START + 4 : HEAD_AT] != NAME:
        return None
    try:
        strip, of_height, count, frame = HEAD.unpack_from(content, HEAD_AT)
        starts = struct.unpack_from(f">{count + 1}I", content, TABLE_AT)
    except struct.error:
        return None
    scan, matches = starts[0], of_height == height and strip in (8, 16) and count == -(-height // strip)
    has_scan = any(content[scan - length : scan - length + 2] == SCAN for length in (10, 14))  # grey or colour
    if not matches or not has_scan or content[frame : frame + 2] != b"\xff\xc0":
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
    """Insert the table of strips into a baseline JPEG that has a restart marker after every row of blocks."""
    segments = dict(walk_segments(content))
    frame, scan = segments[FRAME], segments[START_OF_SCAN]
    _, _, height, _, components = struct.unpack_from(">HBHHB", content, frame + 2)
    down = max(content[frame + 11 + 3 * number] & 15 for number in range(components))
    begin = scan + 2 + int.from_bytes(content[scan + 2 : scan + 4])
    ends = [found.end() for found in re.finditer(rb"\xff[\xd0-\xd7\xd9]", content[begin:])]
    starts = [0, *ends]
    assert len(starts) == 1 + -(-height // (8 * down)), "not every row of blocks has a restart marker"
    room = TABLE_AT + 4 * len(starts) - START
    table = [begin + room + start for start in starts]
    head = HEAD.pack(8 * down, height, len(starts) - 1, frame + room)
    segment = MARKER + (room - 2).to_bytes(2) + NAME + head + struct.pack(f">{len(table)}I", *table)
    return content[:START] + segment + content[START:]


def walk_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker and the offset of each segment up to the scan."""
    marker, place = 0, 2
    while marker != START_OF_SCAN:
        marker = content[place + 1]
        yield marker, place
        place += 2 + int.from_bytes(content[place + 2 : place + 4])


def read_size(content: Content, max_pixels: int) -> tuple[int, int, bool]:
    """Return height, width, and whether libjpeg-turbo can decode the image.  Only the header is read."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        is_jpeg = colours in ("YCbCr", "RGB", "Gray")
    except ValueError:
        with open_with_pillow(content) as image:
            (width, height), is_jpeg = image.size, False
    if max(height, width) > LONGEST_SIDE:
        raise Unreadable(f"a side of its {width} x {height} pixels is longer than {LONGEST_SIDE:,}")
    if height * width > max_pixels:
        raise Unreadable(f"its {width} x {height} pixels are more than data.max_pixels={max_pixels}")
    if content[:2] == START_OF_IMAGE and are_too_many(scans := count_scans(content), height * width):
        raise Unreadable(f"its {scans:,} scans of {width} x {height} pixels are more than any encoder writes")
    return height, width, is_jpeg


def read_turn(content: Content) -> Turn:
    """Return how to turn an image by its EXIF data.  Only the header is read."""
    if content[:2] == START_OF_IMAGE:
        return TURNS[find_orientation(jpeg_exif(content))]
    with open_with_pillow(content) as image:
        exif = image.info.get("exif")
        return TURNS[find_orientation(exif)] if isinstance(exif, bytes) else UPRIGHT


def decode_crop(
    content: Content,
    choose_box: Callable[[int, int], Box],
    size: int,
    max_pixels: int,
    colours: str = "RGB",
    turns: bool = False,
) -> Lines:
    """Decode the box `choose_box(height, width)`, to be resized to `size`.  Pixels are valid until the next call.

    If it `turns` images by their EXIF data, the box is in the coordinates of the turned image.
    """
    height, width, is_jpeg = read_size(content, max_pixels)
    turn = read_turn(content) if turns else UPRIGHT
    tall, wide = turn.size(height, width)
    box = top, _, rows, _ = turn.stored(choose_box(tall, wide), tall, wide)
    if is_jpeg:
        scale = dct_scale(box, size)
        strips = cut_rows(content, height, top, rows, reach=2 * scale)
        if strips:
            content, height, box = strips.content, strips.height, (top - strips.top, *box[1:])
        pixels, scale = decode_scaled(content, height, width, scale, colours)
    else:
        pixels, scale = decode_with_pillow(content, colours), 1
    top, left, rows, columns = box if scale == 1 else (edge // scale for edge in box)
    if turn != UPRIGHT:
        turned = turn.upright(pixels[top : top + rows, left : left + columns])
        return turned.reshape(len(turned), -1)
    return pixels.reshape(len(pixels), -1)[top : top + rows, 3 * left : 3 * (left + columns)]


def dct_scale(box: Box, size: int) -> int:
    """Return the largest power of two up to 8 by which a crop can be shrunk and stay larger than its target."""
    return next((scale for scale in DCT_SCALES if min(box[2:]) >= LEAST_MARGIN * scale * size), 1)


def decode_scaled(content: Content, height: int, width: int, scale: int, colours: str = "RGB") -> tuple[Pixels, int]:
    """Decode a JPEG at 1/scale.  Return the pixels and the scale, which is 1 if Pillow had to decode it."""
    rows, columns = -(-height // scale), -(-width // scale)
    try:
        pixels = simplejpeg.decode_jpeg(
            content,
            colours,
            min_height=rows,
            min_width=columns,
            min_factor=scale,
            buffer=thread_buffer("pixels", 3 * rows * columns).bytes,
        )
    except ValueError:  # simplejpeg turns libjpeg's warnings into errors
        return decode_with_pillow(content, colours), 1
    assert pixels.shape == (rows, columns, 3), f"decoded to {pixels.shape}, expected {(rows, columns, 3)}"
    return pixels, scale


def thread_buffer(use: str, count: int) -> Buffer:
    """Return the calling thread's buffer for `use`, of at least `count` bytes."""
    buffer: Buffer | None = getattr(BUFFERS, use, None)
    if buffer is None or len(buffer.bytes) < count:
        memory = np.empty(count, np.uint8)
        buffer = Buffer(memory, torch.from_numpy(memory))
        if count <= MOST_BUFFER_BYTES:
            setattr(BUFFERS, use, buffer)
    return buffer


def open_with_pillow(content: Content) -> Image.Image:
    try:
        return Image.open(BoundedReads(content), formats=FORMATS)
    except PILLOW_ERRORS as error:
        raise Unreadable(reason_of(error, len(content))) from error


def decode_with_pillow(content: Content, colours: str = "RGB") -> Pixels:
    """Decode an image, or the first frame of an animation."""
    with open_with_pillow(content) as image:
        require_cheap(image, len(content))
        try:
            pixels = to_rgb(eight_bits(image))
        except PILLOW_ERRORS as error:
            raise Unreadable(reason_of(error, len(content))) from error
        return np.ascontiguousarray(pixels[:, :, ::-1]) if colours == "BGR" else pixels


def to_rgb(image: Image.Image) -> Pixels:
    """Convert to RGB, large images in bands: converting a whole image takes four times the memory of its pixels."""
    rows = max(1, BAND_PIXELS // image.width)
    if image.height <= rows:
        return np.asarray(image.convert("RGB"))
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(image.height, top + rows)))
        pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels


def require_cheap(image: Image.Image, length: int) -> None:
    """Refuse formats and tile sizes with which a small file could take minutes or gigabytes."""
    pixels = image.width * image.height
    decoders = {tile[0] for tile in getattr(image, "tile", ())}
    if decoders & {*Image.DECODERS} and max(pixels, length) > MOST_SLOW:
        raise Unreadable(
            f"its {image.width} x {image.height} pixels in {length:,} bytes are in a variant of {image.format} that "
            f"decodes slowly, with a limit of {MOST_SLOW:,} pixels and bytes; store it as a PNG"
        )
    tags = getattr(image, "tag_v2", {})  # the decoder of a TIFF allocates memory for a whole tile
    tile_width, tile_height = (tags.get(tag, 0) for tag in (TILE_WIDTH, TILE_HEIGHT))
    if tile_width * tile_height > max(pixels, MOST_TILE_PIXELS):
        raise Unreadable(f"its tiles of {tile_width} x {tile_height} pixels are larger than the image")


def eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey levels to 8 bits; Pillow would make every value above 255 white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unreadable(f"its pixels have mode {image.mode}, which has no maximum; convert them to 8 or 16 bits")
    return image


def reason_of(error: Exception | Warning, length: int) -> str:
    if length == 0:
        return "it is empty"
    if isinstance(error, UnidentifiedImageError):
        return "it is not in a format that Pillow reads"
    return str(error) or type(error).__name__


def resize(lines: Lines, out: torch.Tensor, mirrored: bool = False) -> None:
    """Resize lines to `out`, uint8 [3, H, W] or [1, 3, H, W] with any strides.

    To be mirrored, lines must be BGR: a BGR line read backwards is a mirrored RGB line.  So mirroring is part of a copy
    that is needed anyway: torch would copy a non-contiguous input itself, with an OpenMP team.
    """
    height, width = len(lines), lines.shape[1] // 3
    buffer = thread_buffer("crop", lines.size)
    np.copyto(buffer.bytes[: lines.size].reshape(lines.shape), lines[:, ::-1] if mirrored else lines)
    source = buffer.tensor.as_strided((1, 3, height, width), (lines.size, 1, 3 * width, 3))
    if out.ndim == 3:
        out = out[None]
    if source.shape == out.shape:
        out.copy_(source)
    else:
        resize_antialiased(source, out.shape[2:], False, None, None, out=out)
