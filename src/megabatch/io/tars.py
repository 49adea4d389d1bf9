"""Find the members of a tar.  For a million members, `tarfile` takes several times as long.

A member is a header of 512 bytes and its content, padded to whole blocks.  A block of zeros ends the tar.  A header of
type L (GNU) or x (pax) extends the header of the next member, for example with a long name.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
NAME, LENGTH, CHECKSUM, PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), slice(345, 500)
TYPE, MAGIC = slice(156, 157), slice(257, 263)
REGULAR, WITHOUT_CONTENT = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
LONG_NAME, PAX, EXTENSIONS = b"L", b"x", (b"L", b"x", b"g", b"K")
MOST_EXTENSION_BLOCKS = 16  # searched for a long name; the longest path of Linux has 8
MOST_EXTENSION_BYTES = 1 << 20
MOST_DIGITS = 20  # digits of a length in a pax header

Read = Callable[[int, int], bytes]  # (offset, length) -> bytes; fewer at the end of the file


class Damaged(Exception):
    """Error for a tar that is damaged at `offset`."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset, self.reason = offset, reason


class Member(NamedTuple):
    name: str
    offset: int  # of the content
    length: int
    first_block: bytes  # of the content, which was read with the header


def walk_members(read: Read, size: int, offset: int = 0) -> Iterator[Member]:
    """Yield the regular files of a tar of `size` bytes, from the header at `offset` on."""
    extended: dict[str, str] = {}  # fields of the next member
    while True:
        blocks = read(offset, 2 * BLOCK)
        header, begin = blocks[:BLOCK], offset + BLOCK
        if len(header) < BLOCK:
            raise Damaged(offset, "it is truncated")
        if not any(header):
            return
        try:
            length = content_length(header, extended)
            if length < 0 or begin + length > size:
                raise ValueError(f"its member has {length:,} bytes, more than are left")
            kind = header[TYPE]
            if kind in (LONG_NAME, PAX) and length > MOST_EXTENSION_BYTES:
                raise ValueError(f"a header extension has {length:,} bytes; the limit is {MOST_EXTENSION_BYTES:,}")
            if kind == LONG_NAME:
                extended["path"] = to_text(read(begin, length))
            elif kind == PAX:
                extended |= parse_pax(read(begin, length))
        except ValueError as error:
            raise Damaged(offset, str(error)) from None
        if kind in REGULAR:
            yield Member(extended.get("path") or header_name(header), begin, length, blocks[BLOCK:][:length])
        if kind not in EXTENSIONS:
            extended = {}
        offset = begin + padded(length)


def member_name(read: Read, size: int, offset: int) -> str:
    """Return the name of the member whose content begins at `offset`.  Raise Damaged if there is none."""
    header = read(offset - BLOCK, BLOCK)
    for count in range(1, min(MOST_EXTENSION_BLOCKS, offset // BLOCK - 1)):
        before = offset - (count + 2) * BLOCK
        extension = read(before, BLOCK) if before >= 0 else b""
        if extension[TYPE] in (LONG_NAME, PAX) and extends(extension, count):
            member = next(walk_members(read, size, before), None)
            if member is None:
                break
            return member.name
    if len(header) < BLOCK or not is_header(header):
        raise Damaged(offset - BLOCK, "it is not a header")
    return header_name(header)


def extends(header: bytes, num_blocks: int) -> bool:
    try:
        return is_header(header) and padded(content_length(header, {})) == num_blocks * BLOCK
    except ValueError:
        return False


def is_header(header: bytes) -> bool:
    """Check the checksum: the sum of all bytes, with the checksum itself replaced by spaces."""
    try:
        return parse_octal(header[CHECKSUM]) == sum(header) - sum(header[CHECKSUM]) + 8 * ord(" ")
    except ValueError:
        return False


def content_length(header: bytes, extended: dict[str, str]) -> int:
    if not is_header(header):
        raise ValueError("it is not a header")
    kind = header[TYPE]
    if kind in WITHOUT_CONTENT:
        return 0
    if "size" in extended and kind not in EXTENSIONS:
        return parse_decimal(extended["size"])
    field = header[LENGTH]
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else parse_octal(field)


def padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def parse_octal(field: bytes) -> int:
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def parse_decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError(f"{text[:MOST_DIGITS]!r} is not a length")
    return int(text)


def parse_pax(content: bytes) -> dict[str, str]:
    """Parse records of "LENGTH KEY=VALUE\\n", in which LENGTH counts the whole record."""
    records = {}
    content, begin = content.rstrip(b"\0"), 0
    while begin < len(content):
        length = parse_decimal(to_text(content[begin : begin + MOST_DIGITS].partition(b" ")[0]))
        key, equals, value = content[begin : begin + length].partition(b" ")[2].partition(b"=")
        if length < 5 or begin + length > len(content) or not equals:
            raise ValueError("a pax header is damaged")
        records[to_text(key)] = to_text(value.removesuffix(b"\n"))
        begin += length
    return records


def header_name(header: bytes) -> str:
    prefix = to_text(header[PREFIX]) if header[MAGIC] == b"ustar\0" else ""
    return f"{prefix}/{to_text(header[NAME])}" if prefix else to_text(header[NAME])


def to_text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")
