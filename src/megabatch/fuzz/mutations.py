"""Bytes made wrong: what disks, networks and people do to files.  All that is random comes from the given generator."""

import struct
import zlib
from collections.abc import Callable
from random import Random

WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
LONGEST_RUN = 1 << 16  # bytes that one mutation adds


def mutate(content: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Between one and four mutations; `other` is a file to splice with."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(MUTATIONS)(content, rng) if content else insert(content, rng)
    if other and rng.random() < 0.05:
        return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other)) :]
    return content


def span(content: bytes, rng: Random, longest: int = 256) -> tuple[int, int]:
    begin = rng.randrange(len(content))
    return begin, min(len(content), begin + rng.randint(1, longest))


def flip_bit(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def flip_bit_near_start(content: bytes, rng: Random) -> bytes:
    """Where headers are."""
    head = rng.choice((16, 64, 512))
    return flip_bit(content[:head], rng) + content[head:]


def overwrite_number(content: bytes, rng: Random) -> bytes:
    """A number that lies at an edge, as wide and in the order in which formats keep them."""
    width = rng.choice(list(WIDTHS))
    highest = (1 << (8 * width)) - 1
    value = rng.choice((0, 1, highest, highest >> 1, (highest >> 1) + 1, highest - 1, rng.randint(0, highest)))
    at = rng.randrange(len(content))
    return content[:at] + struct.pack(rng.choice("<>") + WIDTHS[width], value) + content[at + width :]


def truncate(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(len(content))]


def delete(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng)
    return content[:begin] + content[end:]


def insert(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 16, 600))) + content[at:]


def repeat(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng, 64)
    count = rng.choice((2, 100, LONGEST_RUN // (end - begin)))
    return content[:begin] + content[begin:end] * count + content[end:]


def blank(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng, 4096)
    return content[:begin] + rng.choice((b"\0", b"\xff", b" ")) * (end - begin) + content[end:]


def swap(content: bytes, rng: Random) -> bytes:
    first, second, third = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    return content[:first] + content[second:third] + content[first:second] + content[third:]


def replace_letter(content: bytes, rng: Random) -> bytes:
    """One that has a meaning in texts."""
    at = rng.randrange(len(content))
    return content[:at] + bytes([rng.choice(b"0123456789.-+eE\"'[]{}(),:=#\\/\n\0 ")]) + content[at + 1 :]


MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    flip_bit,
    flip_bit_near_start,
    overwrite_number,
    overwrite_number,
    truncate,
    delete,
    insert,
    repeat,
    blank,
    swap,
    replace_letter,
)


def zeros_deflated(count: int) -> bytes:
    """Raw deflate of about so many zeros, in a thousandth of them and no time: one block, over and over."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (count >> 20) + packer.flush()
