"""Decoding compared with Pillow, on photos and unusual files."""

import contextlib
import io
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from megabatch.data.pipeline.decode import (
    DCT_SCALES,
    LEAST_MARGIN,
    Unreadable,
    dct_scale,
    decode_crop,
    read_size,
    require_cheap,
    resize,
)
from megabatch.data.pipeline.orientation import Box, find_orientation
from megabatch.data.pipeline.shrink import prepare
from tests.support.photos import decode, encoded, photo

PLENTY = 10**9


def ours(content: bytes, box: Box, size: int) -> np.ndarray:
    out = torch.empty(size, size, 3, dtype=torch.uint8).permute(2, 0, 1)
    resize(decode_crop(content, lambda height, width: box, size, PLENTY), out)
    return out.permute(1, 2, 0).numpy().astype(int)


def pillows(content: bytes, box: Box, size: int) -> np.ndarray:
    top, left, height, width = box
    image = Image.open(io.BytesIO(content)).convert("RGB").crop((left, top, left + width, top + height))
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).astype(int)


def choose(box: Box, height: int, width: int) -> Box:
    return box


def boxes(height: int, width: int, count: int) -> list[Box]:
    draws = np.random.default_rng(0).random((count, 4))
    sizes = [(1 + int(a * height), 1 + int(b * width)) for a, b in draws[:, :2]]
    return [
        (int(top * (height - rows + 1)), int(left * (width - columns + 1)), rows, columns)
        for (rows, columns), (top, left) in zip(sizes, draws[:, 2:], strict=True)
    ]


PHOTO = photo(5, 150, 110)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # viewers rotate it
GREY = PHOTO.convert("L")
CONTENTS = {
    "jpeg": encoded(PHOTO),
    "jpeg 4:4:4": encoded(PHOTO, quality=98, subsampling=0),
    "progressive": encoded(PHOTO, progressive=True),
    "grey jpeg": encoded(GREY),
    "cmyk jpeg": encoded(PHOTO.convert("CMYK")),
    "turned by exif": encoded(PHOTO, exif=TURNED),
    "junk after the end": encoded(PHOTO) + b"junk",
    "png": encoded(PHOTO, "PNG"),
    "grey png": encoded(GREY, "PNG"),
    "transparent png": encoded(PHOTO.convert("RGBA"), "PNG"),
    "palette": encoded(PHOTO.convert("P"), "GIF"),
    "black and white": encoded(PHOTO.convert("1"), "PNG"),
    "webp": encoded(PHOTO, "WEBP"),
    "bmp": encoded(PHOTO, "BMP"),
    "tiff": encoded(PHOTO, "TIFF"),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_crop_matches_pillow_to_one_level(kind: str) -> None:
    for size in (40, 64, 128):
        for box in boxes(110, 150, 25):
            if dct_scale(box, size) == 1:
                assert abs(ours(CONTENTS[kind], box, size) - pillows(CONTENTS[kind], box, size)).max() <= 1


def test_the_whole_image_is_bitwise_identical_to_pillows() -> None:
    for content in CONTENTS.values():
        assert np.array_equal(decode(content, PLENTY), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_a_scaled_crop_shifts_less_than_a_scaled_pixel_and_stays_close_to_pillow() -> None:
    content = encoded(photo(20, 900, 700), quality=92)
    seen = set()
    for size in (16, 32, 64):
        for box in boxes(700, 900, 20):
            scale = dct_scale(box, size)
            seen.add(scale)
            top, left, height, width = (edge // scale * scale for edge in box)
            deviations = abs(ours(content, box, size) - pillows(content, (top, left, height, width), size))
            assert deviations.mean() < 2.5 and deviations.max() < 40
    assert seen == {1, *DCT_SCALES}


def test_scaled_decoding_is_never_followed_by_enlarging() -> None:
    for size in (8, 32, 224):
        for edge in range(size, 20 * size, 7):
            scale = dct_scale((0, 0, edge, edge + 5), size)
            assert scale == 1 or edge // scale >= LEAST_MARGIN * size - 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (300, 1), (8, 8), (17, 33)])
def test_one_pixel_wide_images_are_decoded(shape: tuple[int, int]) -> None:
    height, width = shape
    for format in ("JPEG", "PNG"):
        content = encoded(photo(3, width, height), format)
        assert read_size(content, PLENTY)[:2] == shape
        assert abs(ours(content, (0, 0, height, width), 24) - pillows(content, (0, 0, height, width), 24)).max() <= 1


def test_16_bit_values_are_reduced_to_their_upper_8_bits() -> None:
    """Pillow clips them, which makes nearly all pixels white."""
    levels = np.arange(0, 60000, 50, dtype=np.uint16).reshape(30, 40)
    for format in ("PNG", "TIFF"):
        pixels = decode(encoded(Image.fromarray(levels), format), PLENTY)
        assert np.array_equal(pixels, np.stack([levels >> 8] * 3, axis=-1))
    with pytest.raises(Unreadable, match="its pixels have mode F"):
        decode(encoded(Image.fromarray(levels.astype(np.float32)), "TIFF"), PLENTY)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"no image at all", "not in a format that Pillow reads"),
        (CONTENTS["jpeg"][:700], "truncated"),
        (CONTENTS["jpeg"][:20], "."),
        (CONTENTS["png"][:700], "truncated"),
        (CONTENTS["webp"][:100], "."),
    ],
)
def test_invalid_images_are_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        ours(content, (0, 0, 8, 8), 8)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_decompression_bomb_is_refused_by_its_header(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(PHOTO, format)
    monkeypatch.setattr("simplejpeg.decode_jpeg", None)
    monkeypatch.setattr("PIL.Image.Image.convert", None)
    with pytest.raises(Unreadable, match=r"150 x 110 pixels are more than data.max_pixels=16499"):
        decode_crop(content, lambda height, width: (0, 0, 8, 8), 8, max_pixels=150 * 110 - 1)


def test_a_memoryview_decodes_like_bytes() -> None:
    content = CONTENTS["jpeg"]
    inside = memoryview(b"before" + content + b"after")[6 : 6 + len(content)]
    assert np.array_equal(decode(inside, PLENTY), decode(content, PLENTY))


@pytest.mark.parametrize("kind", ["jpeg", "png", "grey jpeg"])
def test_decoding_a_mirrored_crop_mirrors_the_crop(kind: str) -> None:
    for size in (40, 64, 128):
        for box in boxes(110, 150, 12):
            out = torch.empty(1, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
            pixels = decode_crop(CONTENTS[kind], partial(choose, box), size, PLENTY, "BGR")
            resize(pixels, out, mirrored=True)
            assert np.array_equal(out[0].permute(1, 2, 0).numpy()[:, ::-1], ours(CONTENTS[kind], box, size))


def ppm(kind: str, width: int, height: int, largest: int, content: bytes) -> bytes:
    return f"{kind} {width} {height} {largest} ".encode() + content


def test_large_images_that_pillow_decodes_in_python_are_refused() -> None:
    small = ppm("P3", 4, 2, 255, b"7 8 9 " * 8)
    assert np.array_equal(decode(small, PLENTY), np.full((2, 4, 3), (7, 8, 9)))
    for content in (ppm("P6", 1000, 1000, 254, bytes(3_000_000)), ppm("P3", 2, 2, 255, b" " * 3_000_000)):
        with pytest.raises(Unreadable, match="a variant of PPM that decodes slowly"):
            decode(content, PLENTY)
    assert decode(ppm("P6", 1000, 1000, 255, bytes(3_000_000)), PLENTY).shape == (1000, 1000, 3)


def test_converting_large_images_in_bands_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.data.pipeline.decode.BAND_PIXELS", 1000)
    for image in (PHOTO, PHOTO.convert("P"), PHOTO.convert("L"), PHOTO.convert("RGBA"), PHOTO.convert("1")):
        content = encoded(image, "PNG")
        assert np.array_equal(decode(content, PLENTY), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_a_tiff_with_tiles_larger_than_the_image_is_refused() -> None:
    """libtiff allocates memory for a whole tile."""
    image = Image.open(io.BytesIO(encoded(PHOTO, "TIFF")))
    assert isinstance(image, TiffImageFile)
    require_cheap(image, 1000)
    image.tag_v2[322], image.tag_v2[323] = 60_000, 30_000
    with pytest.raises(Unreadable, match="tiles of 60000 x 30000 pixels"):
        require_cheap(image, 1000)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xd8" + b"\xff\xfe\0\2" * 200_000,
        b"\xff\xd8\xff\xfe\0\2" + bytes(200_000),
        b"GIF89a\x04\0\x04\0\0\0\0" + b"\x21\xfe\1a\0" * 200_000,
        CONTENTS["png"][:33] + (bytes(4) + b"tEXt" + zlib.crc32(b"tEXt").to_bytes(4)) * 200_000,
    ],
)
def test_an_endless_header_is_refused(content: bytes) -> None:
    with pytest.raises(Unreadable, match="too many tiny segments"):
        decode(content, PLENTY)


def test_an_image_with_millions_of_rows_is_refused() -> None:
    content = bytearray(encoded(Image.new("L", (1, 1)), "PNG"))
    content[20:24] = (2_000_000).to_bytes(4)
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4)
    with pytest.raises(Unreadable, match="1 x 2000000 pixels is longer than"):
        decode(bytes(content), PLENTY)


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_an_animation_decodes_to_its_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(decode(content, PLENTY), np.asarray(frames[0]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of damaged TIFFs
def test_damaged_bytes_raise_only_unreadable() -> None:
    random = np.random.default_rng(0)
    for _ in range(400):
        content = bytearray(CONTENTS[list(CONTENTS)[random.integers(len(CONTENTS))]])
        for place in random.integers(0, min(len(content), 200), random.integers(1, 6)):
            content[place] = random.choice([0, 1, 127, 255, int(random.integers(256))])
        with contextlib.suppress(Unreadable):
            decode_crop(bytes(content), lambda height, width: (0, 0, height, width), 16, 10**6)


def turned_by_pillow(content: bytes, box: Box, size: int) -> np.ndarray:
    top, left, height, width = box
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    cropped = image.crop((left, top, left + width, top + height))
    return np.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR)).astype(int)


def turned_by_us(content: bytes, box: Box, size: int, is_mirrored: bool = False) -> np.ndarray:
    out = torch.empty(size, size, 3, dtype=torch.uint8).permute(2, 0, 1)
    colours = "BGR" if is_mirrored else "RGB"
    resize(decode_crop(content, lambda height, width: box, size, PLENTY, colours, turns=True), out, is_mirrored)
    return out.permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "packed"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_by_pillow(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    content = encoded(PHOTO, "JPEG" if kind == "packed" else kind, exif=exif, **options)
    if kind == "packed":  # smaller, in strips, with the tag of the original
        content = bytes(prepare(content, shorter_side=100, quality=90).content)
        assert Image.open(io.BytesIO(content)).getexif().get(0x0112, 1) == orientation
    sides: list[tuple[int, int]] = []

    def choose_box(height: int, width: int) -> Box:
        sides.append((height, width))
        return 0, 0, 9, 9

    decode_crop(content, choose_box, 9, PLENTY, turns=True)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert sides == [(upright.height, upright.width)]
    for box in boxes(upright.height, upright.width, 4):
        expected = turned_by_pillow(content, box, 64)
        assert abs(turned_by_us(content, box, 64) - expected).max() <= 1, box
        assert abs(turned_by_us(content, box, 64, is_mirrored=True) - expected[:, ::-1]).max() <= 1, box
    whole = (0, 0, upright.height, upright.width)  # decoded at a quarter of its size
    assert abs(turned_by_us(content, whole, 12) - turned_by_pillow(content, whole, 12)).mean() < 8


@pytest.mark.parametrize(
    "exif", [b"", b"Exif", b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", TURNED.tobytes()[:-20]]
)
def test_damaged_exif_data_leave_an_image_as_it_is(exif: bytes) -> None:
    assert find_orientation(exif) == 1
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2) + exif
    content, box = CONTENTS["jpeg"], (0, 0, 90, 90)
    damaged = content[:2] + segment + content[2:]
    assert np.array_equal(turned_by_us(damaged, box, 64), ours(content, box, 64))


def test_orientation_is_ignored_by_default() -> None:
    plain, turned = CONTENTS["jpeg"], CONTENTS["turned by exif"]
    assert np.array_equal(ours(turned, (0, 0, 110, 150), 24), ours(plain, (0, 0, 110, 150), 24))
