"""Cutting a JPEG before decoding changes no pixel."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megabatch.data.pipeline import decode as decoding
from megabatch.data.pipeline.decode import Unreadable, cut_rows, decode_crop, with_table
from megabatch.data.pipeline.orientation import Box
from tests.support.photos import decode, encoded, photo

PLENTY = 10**9
KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "grey": {},
}


def striped(kind: str, height: int, width: int = 75) -> bytes:
    image = photo(8, width, height)
    return with_table(encoded(image.convert("L") if kind == "grey" else image, restart_marker_rows=1, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("height", [16, 100, 256, 301])
def test_every_cut_has_the_pixels_of_the_whole_image(kind: str, height: int) -> None:
    content = striped(kind, height)
    whole = decode(content, PLENTY).copy()
    num_cut = 0
    for top in range(0, height, 7):
        for rows in {1, 9, 40, height - top}:
            rows = min(rows, height - top)
            strips = cut_rows(content, height, top, rows, reach=2)
            if strips:
                num_cut += 1
                pixels = decode(strips.content, PLENTY)
                assert pixels.shape == (strips.height, *whole.shape[1:])
                inside = pixels[top - strips.top :][:rows]
                assert np.array_equal(inside, whole[top : top + rows])
    assert num_cut or height == 16


@pytest.mark.parametrize("size", [8, 12, 30, 64])
def test_a_crop_is_the_same_with_and_without_cutting(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = striped("4:2:0", 301, 240)
    boxes = [(top, 5 * (top % 7), min(90 + top % 50, 301 - top), 110 + top % 90) for top in range(0, 260, 11)]
    cut = [decode_crop(content, lambda *shape, box=box: box, size, PLENTY).copy() for box in boxes]
    monkeypatch.setattr(decoding, "cut_rows", lambda *arguments, **more: None)
    for box, pixels in zip(boxes, cut, strict=True):
        assert np.array_equal(pixels, decode_crop(content, lambda *shape, box=box: box, size, PLENTY))


@pytest.mark.parametrize("content", [encoded(photo(8, 75, 200)), encoded(photo(8, 75, 200), "PNG"), b"\xff\xd8", b""])
def test_images_without_a_table_are_not_cut(content: bytes) -> None:
    assert cut_rows(content, 200, 150, 40, reach=2) is None


def test_other_readers_ignore_the_table() -> None:
    plain = encoded(photo(8, 75, 200), restart_marker_rows=1)
    assert np.array_equal(decode(with_table(plain), PLENTY).copy(), decode(plain, PLENTY))
    one, other = (np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in (plain, with_table(plain)))
    assert np.array_equal(one, other)


def test_a_memoryview_can_be_cut() -> None:
    content = striped("4:2:0", 200)
    assert cut_rows(memoryview(content), 200, 0, 20, 2) == cut_rows(content, 200, 0, 20, 2) is not None


def test_a_table_that_does_not_match_its_image_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may encode the image again and copy the segments that it does not know."""
    content = striped("4:2:0", 200)
    table = content[20 : 20 + 2 + int.from_bytes(content[22:24])]
    others = [encoded(photo(9, 75, height), restart_marker_rows=1) for height in (200, 184, 400)]
    stale = [other[:20] + table + other[20:] for other in others]
    generator = np.random.default_rng(0)
    for place in range(20, 110):
        damaged = bytearray(content)
        damaged[place] = int(generator.integers(256))
        stale.append(bytes(damaged))
    box = (100, 3, 40, 60)
    cut = [crop_or_reason(each, box) for each in stale]
    monkeypatch.setattr(decoding, "cut_rows", lambda *arguments, **more: None)
    assert cut == [crop_or_reason(each, box) for each in stale]
    assert sum(isinstance(each, bytes) for each in cut) > 80


def crop_or_reason(content: bytes, box: Box) -> bytes | str:
    try:
        return decode_crop(content, lambda *shape: box, 30, 100 * 1000).tobytes()
    except Unreadable as error:
        return str(error)
