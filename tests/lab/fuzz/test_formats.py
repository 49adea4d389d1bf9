"""Inputs are functions of their number, and what is right is told from what is wrong."""

import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.formats import Bench, make_input
from megabatch_lab.fuzz.mutations import MUTATIONS, lie_in_json, zeros_deflated
from megabatch_lab.fuzz.outcome import Outcome, alike, count_by_format
from megabatch_lab.fuzz.trained import RUNS, without_times
from megabatch_lab.fuzz.worker import judge

from megabatch.errors import UserError

WHOLE = [{"image": b"\xff\xd8\xff\xe0\0\x04ab\xff\xd9"}]
ALONE = [name for name in FORMATS if name not in RUNS]  # without a run of their own


@pytest.mark.parametrize("name", ALONE)
def test_what_is_whole_is_accepted_and_what_is_not_is_another_input(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = FORMATS[name].set_up(tmp_path / "bench", stack)
        for number, specimen in enumerate(bench.specimens):
            outcome = judge(
                name, whole_number(name, specimen), Bench([specimen], bench.read), 7, tmp_path / f"{number}"
            )
            assert (outcome.kind, outcome.past_header) == ("ok", True), outcome
        made = [make_input(name, FORMATS[name], bench.specimens, 7, number) for number in range(60)]
        again = [make_input(name, FORMATS[name], bench.specimens, 7, number) for number in range(60)]
    assert made == again
    changed = [given.files for given in made if not given.is_whole]
    assert sum(files not in bench.specimens for files in changed) > 0.8 * len(changed)


def whole_number(name: str, specimen: dict[str, bytes]) -> int:
    """Of an input that is left as it is."""
    return next(n for n in range(10_000) if make_input(name, FORMATS[name], [specimen], 7, n).is_whole)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_take_any_bytes(mutation: object) -> None:
    for seed, content in enumerate((b"x", b"ab", bytes(1000), b"text = 1\n" * 300)):
        assert isinstance(mutation(content, Random(seed)), bytes)  # type: ignore[operator]


def test_zeros_that_were_packed_come_out_of_a_thousandth() -> None:
    packed = zeros_deflated(64 << 20)
    assert len(packed) < 100_000
    assert zlib.decompress(packed, wbits=-zlib.MAX_WBITS) == bytes(64 << 20)


def test_a_lie_in_json_is_json_of_another_value() -> None:
    document = b'{"a": [1, 2, {"b": null}], "c": "text"}'
    lies = {lie_in_json(document, Random(seed)) for seed in range(200)}
    assert len(lies) > 100 and document not in lies


def refuse(text: str) -> Bench:
    def read(folder: Path) -> None:
        raise UserError(text)

    return Bench([{"image": b"x"}], read)


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (UserError("the value, the rule, the remedy"), "one line", "the rule"),
        (UserError(""), "escaped", "is not one line"),
        (RecursionError("deep"), "escaped", "RecursionError: deep"),
        (KeyError("x"), "escaped", "KeyError"),
        (MemoryError(), "escaped", "MemoryError"),
    ],
)
def test_only_one_line_is_a_refusal(raised: Exception, kind: str, said: str, tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        raise raised

    changed = next(n for n in range(100) if not make_input("jpeg", FORMATS["jpeg"], WHOLE, 7, n).is_whole)
    outcome = judge("jpeg", changed, Bench(WHOLE, read), 7, tmp_path / "input")
    assert outcome.kind == kind and said in outcome.detail


def test_a_refusal_behind_which_memory_ran_out_has_escaped(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise UserError("it is too large; give another") from error

    changed = next(n for n in range(100) if not make_input("jpeg", FORMATS["jpeg"], WHOLE, 7, n).is_whole)
    outcome = judge("jpeg", changed, Bench(WHOLE, read), 7, tmp_path / "input")
    assert outcome.kind == "escaped" and "memory" in outcome.detail


def test_what_is_right_and_refused_has_escaped(tmp_path: Path) -> None:
    whole = next(n for n in range(1000) if make_input("jpeg", FORMATS["jpeg"], WHOLE, 7, n).is_whole)
    outcome = judge("jpeg", whole, Bench(WHOLE, refuse("no; give another").read), 7, tmp_path / "input")
    assert outcome.kind == "escaped" and "no; give another" in outcome.detail


def test_escapes_at_one_place_are_counted_together() -> None:
    outcomes = [
        Outcome(format="tar", number=number, kind="escaped", detail=f"KeyError: {number}", where="tars.py:1 walk")
        for number in range(3)
    ]
    outcomes += [Outcome(format="tar", number=3, kind="escaped", detail="it took longer than it may")]
    outcomes += [Outcome(format="png", number=0, kind="ok", past_header=True)]
    assert [(example.number, count) for example, count in alike(outcomes[:4])] == [(0, 3), (3, 1)]
    png, tar = count_by_format(["png", "tar"], outcomes)
    assert (png.inputs, png.ok, png.past_header, png.escaped) == (1, 1, 1, 0)
    assert (tar.inputs, tar.escaped, tar.ok) == (4, 4, 0)


def test_what_a_run_has_measured_does_not_change_its_inputs() -> None:
    slow, fast = (
        json.dumps(
            {"step": 3, "loss": 0.5, "wall_s": time, "data_wait": {"read": time}, "buckets": [{"ready_s": time}]}
        )
        for time in (1.5, 0.1)
    )
    assert without_times(slow.encode()) == without_times(fast.encode())
    assert json.loads(without_times(slow.encode()))["loss"] == 0.5
