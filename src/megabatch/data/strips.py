"""Cuts a JPEG to the rows that a crop needs, so that the others are not decoded.

Every block of a JPEG is coded against the one before it, but behind a restart marker coding begins anew.  Where there
is one behind every row of blocks, as `megabatch pack` writes them, the file can be cut there: a header with another
height, some strips of 8 or 16 rows of pixels, their markers counted from 0 again.  A random crop has 0.7 of the height
in the mean.  Its pixels are those of the whole image, bit for bit: strips that colours are interpolated from are kept.
"""

from typing import NamedTuple

from megabatch.data.files import Content

BASELINE, RESTART_INTERVAL, SCAN, RESTART, END = 0xC0, 0xDD, 0xDA, 0xD0, b"\xff\xd9"
OTHER_FRAMES = {*range(0xC1, 0xD0)} - {0xC4, 0xC8, 0xCC}  # progressive ones, for the most part
REACH = 16  # rows of pixels beyond the crop that may count for it, where it is decoded at an eighth


class Strips(NamedTuple):
    content: bytes  # a JPEG
    top: int  # the row of the whole image that is its first
    height: int


class Layout(NamedTuple):
    frame: int  # where the header of the frame begins
    scan: int  # where the strips begin
    height: int
    strip: int  # rows of pixels in one


def cut_rows(content: Content, top: int, rows: int) -> Strips | None:
    """The strips in which these rows lie; None where they are all, or cannot be had alone."""
    layout = find_layout(content)
    if layout is None:
        return None
    count = -(-layout.height // layout.strip)
    first = max(0, top - REACH) // layout.strip
    last = min(count, -(-(top + rows + REACH) // layout.strip))
    if last - first == count:
        return None
    whole = bytes(content)
    starts = [layout.scan]  # of every strip up to the one behind the last
    for strip in range(last if last < count else last - 1):
        # Such a pair of bytes is nothing else: in the coded blocks themselves 0 follows upon 255.
        found = whole.find(bytes([0xFF, RESTART + strip % 8]), starts[-1])
        if found < 0:
            return None
        starts.append(found + 2)
    height = min(layout.height, last * layout.strip) - first * layout.strip
    begin, end = starts[first], starts[last] - 2 if last < count else len(whole)
    cut = bytearray(whole[: layout.scan] + whole[begin:end])
    cut[layout.frame + 5 : layout.frame + 7] = height.to_bytes(2)
    for strip in range(first + 1, last):
        cut[layout.scan + starts[strip] - begin - 1] = RESTART + (strip - first - 1) % 8
    return Strips(bytes(cut) + END * (last < count), first * layout.strip, height)


def find_layout(content: Content) -> Layout | None:
    """None if this is no baseline JPEG with a restart marker behind every row of blocks."""
    place, frame, interval = 2, None, 0
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker, length = content[place + 1], content[place + 2] << 8 | content[place + 3]
        if marker == BASELINE:
            frame = place
        elif marker == RESTART_INTERVAL:
            interval = content[place + 4] << 8 | content[place + 5]
        elif marker == SCAN:
            return describe(content, frame, place + 2 + length, interval) if frame and interval else None
        elif marker in OTHER_FRAMES:
            return None
        place += 2 + length
    return None


def describe(content: Content, frame: int, scan: int, interval: int) -> Layout | None:
    height, width = (content[frame + at] << 8 | content[frame + at + 1] for at in (5, 7))
    components = content[frame + 9]
    samplings = [content[frame + 11 + 3 * number] for number in range(components)]
    across, down = (1, 1) if components == 1 else (max(s >> 4 for s in samplings), max(s & 15 for s in samplings))
    # A scan of some components alone is followed by others.
    is_whole = content[scan - 4 - 2 * components] == components
    is_by_rows = interval == -(-width // (8 * across))
    return Layout(frame, scan, height, 8 * down) if is_whole and is_by_rows and height else None
