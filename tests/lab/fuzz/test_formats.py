import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.formats import Bench, make_input
from megabatch_lab.fuzz.mutations import MUTATIONS, corrupt_json, zeros_deflated
from megabatch_lab.fuzz.outcome import InputOutcome, alike, count_by_format
from megabatch_lab.fuzz.trained import RUNS, without_times
from megabatch_lab.fuzz.worker import judge

from megabatch.errors import UserError

VALID = [{"image": b"\xff\xd8\xff\xe0\0\x04ab\xff\xd9"}]
WITHOUT_RUN = [name for name in FORMATS if name not in RUNS]


@pytest.mark.parametrize("name", WITHOUT_RUN)
def test_valid_inputs_are_accepted_and_inputs_are_reproducible(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = FORMATS[name].set_up(tmp_path / "bench", stack)
        for number, specimen in enumerate(bench.specimens):
            outcome = judge(
                name, valid_number(name, specimen), Bench([specimen], bench.read), 7, tmp_path / f"{number}"
            )
            assert (outcome.kind, outcome.past_header) == ("ok", True), outcome
        made = [make_input(name, FORMATS[name], bench.specimens, 7, number) for number in range(60)]
        again = [make_input(name, FORMATS[name], bench.specimens, 7, number) for number in range(60)]
    assert made == again
    changed = [given.files for given in made if not given.is_valid]
    assert sum(files not in bench.specimens for files in changed) > 0.8 * len(changed)


def valid_number(name: str, specimen: dict[str, bytes]) -> int:
    """Return the number of a valid input."""
    return next(n for n in range(10_000) if make_input(name, FORMATS[name], [specimen], 7, n).is_valid)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_accept_any_bytes(mutation: object) -> None:
    for seed, content in enumerate((b"x", b"ab", bytes(1000), b"text = 1\n" * 300)):
        assert isinstance(mutation(content, Random(seed)), bytes)  # type: ignore[operator]


def test_deflated_zeros_are_a_thousandth() -> None:
    packed = zeros_deflated(64 << 20)
    assert len(packed) < 100_000
    assert zlib.decompress(packed, wbits=-zlib.MAX_WBITS) == bytes(64 << 20)


def test_corrupt_json_changes_the_document() -> None:
    document = b'{"a": [1, 2, {"b": null}], "c": "text"}'
    found = {corrupt_json(document, Random(seed)) for seed in range(200)}
    assert len(found) > 100 and document not in found


def refuse(text: str) -> Bench:
    def read(folder: Path) -> None:
        raise UserError(text)

    return Bench([{"image": b"x"}], read)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (UserError("the value, the rule, the remedy"), "one line", "the rule"),
        (UserError(""), "escaped", "is not one line"),
        (RecursionError("deep"), "escaped", "RecursionError: deep"),
        (KeyError("x"), "escaped", "KeyError"),
        (MemoryError(), "escaped", "MemoryError"),
    ],
)
def test_only_one_line_is_a_refusal(raised: Exception, kind: str, message: str, tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        raise raised

    changed = next(n for n in range(100) if not make_input("jpeg", FORMATS["jpeg"], VALID, 7, n).is_valid)
    outcome = judge("jpeg", changed, Bench(VALID, read), 7, tmp_path / "input")
    assert outcome.kind == kind and message in outcome.detail


def test_refusal_caused_by_a_memory_error_has_escaped(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise UserError("it is too large; give another") from error

    changed = next(n for n in range(100) if not make_input("jpeg", FORMATS["jpeg"], VALID, 7, n).is_valid)
    outcome = judge("jpeg", changed, Bench(VALID, read), 7, tmp_path / "input")
    assert outcome.kind == "escaped" and "memory" in outcome.detail


def test_refusal_of_a_valid_input_has_escaped(tmp_path: Path) -> None:
    valid = next(n for n in range(1000) if make_input("jpeg", FORMATS["jpeg"], VALID, 7, n).is_valid)
    outcome = judge("jpeg", valid, Bench(VALID, refuse("no; give another").read), 7, tmp_path / "input")
    assert outcome.kind == "escaped" and "no; give another" in outcome.detail


def test_escapes_at_one_place_are_counted_together() -> None:
    outcomes = [
        InputOutcome(format="tar", number=number, kind="escaped", detail=f"KeyError: {number}", where="tars.py:1 walk")
        for number in range(3)
    ]
    outcomes += [InputOutcome(format="tar", number=3, kind="escaped", detail="exceeded the time limit")]
    outcomes += [InputOutcome(format="png", number=0, kind="ok", past_header=True)]
    assert [(example.number, count) for example, count in alike(outcomes[:4])] == [(0, 3), (3, 1)]
    png, tar = count_by_format(["png", "tar"], outcomes)
    assert (png.inputs, png.ok, png.past_header, png.escaped) == (1, 1, 1, 0)
    assert (tar.inputs, tar.escaped, tar.ok) == (4, 4, 0)


def test_measured_values_do_not_change_inputs() -> None:
    slow, fast = (
        json.dumps(
            {"step": 3, "loss": 0.5, "wall_s": time, "data_wait": {"read": time}, "buckets": [{"ready_s": time}]}
        )
        for time in (1.5, 0.1)
    )
    assert without_times(slow.encode()) == without_times(fast.encode())
    assert json.loads(without_times(slow.encode()))["loss"] == 0.5
