"""JPEG, PNG, WebP, AVIF and GIF, read like training reads a file of a class folder."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.settings import DataSettings
from megabatch.data.sources.folders import FolderFiles
from megabatch.io.arrays import Texts
from megabatch.runs.records import TimeBreakdown
from megabatch_lab.fuzz.formats import Files, Format, by_functions
from megabatch_lab.fuzz.mutations import zeros_deflated

SIZE = 32
MAX_PIXELS = 20_000_000  # a quarter of the default, because large valid images take seconds
NAME = "image"
SIDES = (0, 1, 2, 255, 4096, 8000, 16383, 32767, 65535)
BOMB = 4 << 30  # bytes after decompression of 4 MB


def picture(width: int = 96, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Return a smooth picture with an edge, which has all kinds of coefficients."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 3, columns * 2, (rows + columns) % 97 * 2], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> Files:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return {NAME: content.getvalue()}


def jpegs() -> list[Files]:
    return [
        encoded(picture(), "JPEG"),
        encoded(picture(), "JPEG", progressive=True, quality=95, subsampling=0),
        encoded(picture(400, 300), "JPEG", progressive=True),
        encoded(picture(640, 480), "JPEG", restart_marker_rows=1),
        encoded(picture(mode="L"), "JPEG"),
        encoded(picture(mode="CMYK"), "JPEG"),
    ]


def pngs() -> list[Files]:
    deep = Image.fromarray((np.mgrid[:64, :64][0] * 1000).astype(np.uint16))
    return [
        encoded(picture(), "PNG"),
        encoded(picture(mode="P"), "PNG"),
        encoded(picture(mode="RGBA"), "PNG", optimize=True),
        encoded(picture(mode="1"), "PNG"),
        encoded(deep, "PNG"),
    ]


def webps() -> list[Files]:
    return [
        encoded(picture(), "WEBP"),
        encoded(picture(mode="RGBA"), "WEBP", lossless=True),
        encoded(picture(), "WEBP", save_all=True, append_images=[picture(mode="L")] * 3),
    ]


def avifs() -> list[Files]:
    return [
        encoded(picture(), "AVIF", speed=10),
        encoded(picture(mode="RGBA"), "AVIF", speed=10, max_threads=1),
        encoded(picture(), "AVIF", speed=10, save_all=True, append_images=[picture(mode="L")] * 3),
    ]


def gifs() -> list[Files]:
    return [
        encoded(picture(mode="P"), "GIF"),
        encoded(picture(mode="P"), "GIF", save_all=True, append_images=[picture(mode="L")] * 3),
    ]


def read_image(folder: Path) -> None:
    files = FolderFiles(folder, Texts.of([NAME]), np.zeros(1, np.int64))
    images = EncodedImages(files, DataSettings(source="", image_size=SIZE, max_pixels=MAX_PIXELS))
    images.load(0, images.central_box, images.buffer(1), TimeBreakdown(), mirrored=True)


def rearranged(pieces: list[bytes], rng: Random) -> list[bytes]:
    """Drop, move or repeat one piece."""
    at = rng.randrange(len(pieces))
    what = rng.randrange(4)
    if what == 0:
        return pieces[:at] + pieces[at + 1 :]
    if what == 1:
        other = rng.randrange(len(pieces))
        pieces[at], pieces[other] = pieces[other], pieces[at]
        return pieces
    return pieces[:at] + [pieces[at]] * rng.choice((2, 10, 300, 5000 if len(pieces[at]) < 100 else 20)) + pieces[at:]


def segments(jpeg: bytes) -> list[bytes]:
    """Split a JPEG into markers with a length; a start of scan includes the coefficients up to the next marker."""
    pieces, begin = [jpeg[:2]], 2
    while begin + 4 <= len(jpeg):
        end = begin + 2 + int.from_bytes(jpeg[begin + 2 : begin + 4], "big")
        if jpeg[begin + 1] == 0xDA:
            while end < len(jpeg) and (jpeg[end] != 0xFF or jpeg[end + 1] in (0, *range(0xD0, 0xD8))):
                end += 1
        pieces.append(jpeg[begin:end])
        begin = end
    return [*pieces, jpeg[begin:]]


def is_frame(piece: bytes) -> bool:
    return piece[:1] == b"\xff" and piece[1:2] in (b"\xc0", b"\xc1", b"\xc2")


def corrupt_jpeg(files: Files, rng: Random) -> Files:
    pieces = segments(files[NAME])
    what = rng.randrange(6)
    if what == 0:  # the image size
        sides = struct.pack(">HH", rng.choice(SIDES), rng.choice(SIDES))
        pieces = [piece[:5] + sides + piece[9:] if is_frame(piece) else piece for piece in pieces]
    elif what == 1:  # many empty scans of a large image
        scans = [piece[: 2 + int.from_bytes(piece[2:4], "big")] for piece in pieces if piece[:2] == b"\xff\xda"]
        sides = struct.pack(">HH", *[rng.choice((512, 4096, 8000))] * 2)
        head = [piece for piece in pieces[:-1] if piece[:2] != b"\xff\xda"]
        head = [b"\xff\xc2" + piece[2:5] + sides + piece[9:] if is_frame(piece) else piece for piece in head]
        pieces = [*head, *scans * rng.choice((1, 20, 400)), b"\xff\xd9"]
    elif what == 2:  # a length
        at = rng.randrange(1, len(pieces))
        pieces[at] = pieces[at][:2] + struct.pack(">H", rng.choice((0, 1, 2, 3, 65535))) + pieces[at][4:]
    elif what == 3:  # a byte of a table or frame
        at = rng.randrange(1, len(pieces))
        inside = rng.randrange(4, max(5, min(len(pieces[at]), 30)))
        pieces[at] = pieces[at][:inside] + rng.randbytes(1) + pieces[at][inside + 1 :]
    else:
        pieces = rearranged(pieces, rng)
    return {NAME: b"".join(pieces)}


def chunks_of_png(png: bytes) -> list[bytes]:
    """Split a PNG into chunks with a length and a checksum."""
    pieces, begin = [png[:8]], 8
    while begin < len(png):
        end = begin + 12 + int.from_bytes(png[begin : begin + 4], "big")
        pieces.append(png[begin:end])
        begin = end
    return pieces


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb() -> bytes:
    return b"\x78\xda" + zeros_deflated(BOMB) + bytes(4)


def corrupt_png(files: Files, rng: Random) -> Files:
    pieces = chunks_of_png(files[NAME])
    what = rng.randrange(6)
    head = pieces[1][8:-4]
    if what == 0:
        side = rng.choice((*SIDES, 2**31 - 1, 2**32 - 1))
        pieces[1] = png_chunk(b"IHDR", struct.pack(">II", side, rng.choice(SIDES)) + head[8:])
    elif what == 1:  # depth, colour, compression, filter, interlacing
        at = rng.randrange(8, 13)
        pieces[1] = png_chunk(b"IHDR", head[:at] + bytes([rng.randrange(20)]) + head[at + 1 :])
    elif what == 2:
        kind = rng.choice((b"IDAT", b"zTXt", b"iCCP", b"iTXt", b"eXIf"))
        prefix = {b"zTXt": b"x\0\0", b"iCCP": b"x\0\0", b"iTXt": b"x\0\1\0\0\0"}.get(kind, b"")
        pieces.insert(rng.randrange(2, len(pieces)), png_chunk(kind, prefix + bomb()))
    elif what == 3:
        at = rng.randrange(1, len(pieces))
        content = bytearray(pieces[at][8:-4] or b"\0")
        content[rng.randrange(len(content))] = rng.randrange(256)
        pieces[at] = png_chunk(pieces[at][4:8], bytes(content))
    else:
        pieces = rearranged(pieces, rng)
    return {NAME: b"".join(pieces)}


def corrupt_webp(files: Files, rng: Random) -> Files:
    webp, pieces, begin = files[NAME], [], 12
    while begin + 8 <= len(webp):
        end = begin + 8 + (int.from_bytes(webp[begin + 4 : begin + 8], "little") + 1) // 2 * 2
        pieces.append(webp[begin:end])
        begin = end
    if rng.random() < 0.5:
        at = rng.randrange(len(pieces))
        content = bytearray(pieces[at])
        for _ in range(rng.choice((1, 3))):
            content[rng.randrange(min(len(content), 40))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        pieces[at] = bytes(content)
    else:
        pieces = rearranged(pieces, rng)
    body = b"".join(pieces)
    return {NAME: b"RIFF" + struct.pack("<I", (4 + len(body)) & 0xFFFFFFFF) + b"WEBP" + body}


def corrupt_avif(files: Files, rng: Random) -> Files:
    """Corrupt the boxes before the coefficients: their lengths, the size of the image, the place of its data."""
    avif = bytearray(files[NAME])
    end = min(len(avif), max(64, avif.find(b"mdat")))
    for _ in range(rng.choice((1, 3))):
        avif[rng.randrange(12, end)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
    return {NAME: bytes(avif)}


def corrupt_gif(files: Files, rng: Random) -> Files:
    """Corrupt the size of the screen or of the first frame, its code size, or the number of frames."""
    gif = bytearray(files[NAME])
    frame = gif.index(b",", 13 + 3 * 2 ** ((gif[10] & 7) + 1) if gif[10] & 0x80 else 13)
    what = rng.randrange(4)
    if what == 0:
        gif[6:10] = struct.pack("<HH", rng.choice(SIDES), rng.choice(SIDES))
    elif what == 1:
        gif[frame + 1 : frame + 9] = struct.pack("<4H", *(rng.choice(SIDES) for _ in range(4)))
    elif what == 2:
        gif[frame + 9 : frame + 12] = rng.randbytes(3)
    else:
        gif[frame:-1] = gif[frame:-1] * rng.choice((2, 200))
    return {NAME: bytes(gif)}


def opens(kind: str) -> Callable[[Files], bool]:
    """Return a function that checks if Pillow accepts the header as an image of this kind."""

    def has_header(files: Files) -> bool:
        try:
            with Image.open(io.BytesIO(files[NAME]), formats=[kind]) as image:
                return image.width * image.height > 0
        except Exception:  # Pillow is not the reader under test here and may raise anything
            return False

    return has_header


IMAGES = {
    "jpeg": Format(by_functions(jpegs, read_image), corrupt_jpeg, opens("JPEG")),
    "png": Format(by_functions(pngs, read_image), corrupt_png, opens("PNG")),
    "webp": Format(by_functions(webps, read_image), corrupt_webp, opens("WEBP")),
    "avif": Format(by_functions(avifs, read_image), corrupt_avif, opens("AVIF")),
    "gif": Format(by_functions(gifs, read_image), corrupt_gif, opens("GIF")),
}
