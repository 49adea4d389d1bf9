"""JPEGs with many scans, which cost far more to decode than their size suggests."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megabatch.data.pipeline.decode import (
    MOST_SCANNED,
    MOST_SCANS,
    SCAN,
    Unreadable,
    are_too_many,
    count_scans,
    has_one_scan,
    read_size,
)
from megabatch.data.settings import MAX_PIXELS
from tests.support.photos import decode, encoded, photo

EMPTY = SCAN + bytes([0, 8, 1, 1, 0, 1, 63, 0])  # one component
PHOTO = photo(5, 90, 70)


def with_scans(content: bytes, count: int) -> bytes:
    return content[:-2] + EMPTY * count + content[-2:]


@pytest.mark.parametrize("options", [{}, {"quality": 100}, {"subsampling": "4:4:4"}, {"optimize": True}])
def test_a_baseline_jpeg_has_one_scan(options: dict[str, Any]) -> None:
    for image in (PHOTO, PHOTO.convert("L"), PHOTO.convert("CMYK")):
        assert has_one_scan(encoded(image, **options)) and count_scans(encoded(image, **options)) == 1


def test_the_scans_of_a_progressive_jpeg_are_counted() -> None:
    for image, scans in ((PHOTO, 10), (PHOTO.convert("L"), 6)):
        content = encoded(image, progressive=True)
        assert count_scans(content) == scans and count_scans(memoryview(content)) == scans
        assert np.array_equal(decode(content, 10**6), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_with_many_scans_is_refused_by_its_markers(progressive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """libjpeg ignores all scans of a sequential JPEG after the first."""
    content = with_scans(encoded(PHOTO, progressive=progressive), 5000)
    if progressive:
        monkeypatch.setattr("simplejpeg.decode_jpeg", None)
        with pytest.raises(Unreadable, match="5,010 scans of 90 x 70 pixels"):
            decode(content, 10**6)
    else:
        with pytest.raises(Unreadable):
            decode(content, 10**6)


def test_separate_scans_for_each_component_are_counted() -> None:
    content = encoded(PHOTO)
    scan = content.index(SCAN)
    one_colour = content[:scan] + SCAN + bytes([0, 8, 1, 1, 0, 0, 63, 0]) + content[scan + 14 :]
    assert not has_one_scan(one_colour)
    assert count_scans(with_scans(one_colour, 700)) == 701
    with pytest.raises(Unreadable, match="701 scans"):
        read_size(with_scans(one_colour, 700), 10**6)


def test_the_largest_image_may_have_as_many_scans_as_encoders_write() -> None:
    assert not are_too_many(20, MAX_PIXELS) and not are_too_many(1, 10 * MOST_SCANNED)
    assert are_too_many(100, MAX_PIXELS) and are_too_many(MOST_SCANS + 1, 64)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff\xe0\0\x02" * 1000, SCAN * 9]
)
def test_other_files_do_not_count_as_a_single_scan(content: bytes) -> None:
    assert not has_one_scan(content) and count_scans(content) == content.count(SCAN)
