"""JSON from a file, into what it must be: whatever is wrong with it is one error, on one line."""

from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")


class Undecodable(ValueError):
    """Bytes that are not what they should be, and why."""


def decode_json(content: bytes | str, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Undecodable(str(error)) from None
    except RecursionError:  # brackets, a thousand deep
        raise Undecodable("it is nested too deeply") from None
