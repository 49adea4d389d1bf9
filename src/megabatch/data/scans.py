"""How many scans a JPEG has: each is a pass over all of its pixels, and ten bytes are enough for one.

64 megapixels with some thousand empty scans are a file of 400 KB that takes libjpeg minutes.  Encoders write 1 scan, or
about 10 of a progressive JPEG; libjpeg-turbo's own fuzzers stop at 500.
"""

from megabatch.data.files import Content

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
