"""The outcome of an input, as a worker reports it, and the totals."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

Kind = Literal["ok", "one line", "escaped"]


class InputOutcome(Struct, frozen=True, kw_only=True):
    format: str
    number: int
    kind: Kind
    past_header: bool = False
    detail: str = ""  # the error line, or a description of the escape
    where: str = ""  # the innermost frames of an escaped error


class Count(Struct):
    """Totals of one format."""

    format: str
    inputs: int = 0
    ok: int = 0
    one_line: int = 0
    escaped: int = 0
    past_header: int = 0


class FuzzReport(Struct, kw_only=True):
    seed: int
    inputs: int
    seconds: float = 0.0
    counts: list[Count] = field(default_factory=list)
    escapes: list[InputOutcome] = field(default_factory=list)


def count_by_format(names: Iterable[str], outcomes: Iterable[InputOutcome]) -> list[Count]:
    counts = {name: Count(name) for name in names}
    for outcome in outcomes:
        count = counts[outcome.format]
        count.inputs += 1
        count.ok += outcome.kind == "ok"
        count.one_line += outcome.kind == "one line"
        count.escaped += outcome.kind == "escaped"
        count.past_header += outcome.past_header
    return list(counts.values())


def alike(escapes: Iterable[InputOutcome]) -> list[tuple[InputOutcome, int]]:
    """Group escapes by their place in the code; return one example and the count of each, most frequent first."""
    escapes = list(escapes)
    places = Counter((escape.format, escape.where or escape.detail) for escape in escapes)
    first = {(escape.format, escape.where or escape.detail): escape for escape in reversed(escapes)}
    return [(first[place], count) for place, count in places.most_common()]
