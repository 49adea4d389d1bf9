"""JSON from a file, into what it must be: whatever is wrong with it is one error, on one line."""

from typing import TypeVar

import msgspec

Decoded = TypeVar("Decoded")

LONGEST_REASON = 200  # letters of what is wrong, which may quote the file


class Undecodable(ValueError):
    """Bytes that are not what they should be, and why."""


def decode_json(content: bytes | str, kind: type[Decoded]) -> Decoded:
    return decode_with(msgspec.json.Decoder(kind), content)


def decode_with(decoder: "msgspec.json.Decoder[Decoded]", content: bytes | str) -> Decoded:
    """msgspec raises three kinds of errors, of which one is its own."""
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise Undecodable(str(error)[:LONGEST_REASON]) from error.__cause__
    except UnicodeDecodeError as error:
        raise Undecodable(f"it is not text in UTF-8 ({error.reason})") from None
    except RecursionError:
        raise Undecodable("brackets within brackets without end") from None
