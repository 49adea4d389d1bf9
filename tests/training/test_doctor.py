from typing import Any

import pytest

from megabatch.cli.doctor import print_diagnosis
from megabatch.preflight.doctor import Diagnosis, advise
from megabatch.runs.records import TimeBreakdown

DECODING = TimeBreakdown(read=0.1, decode=0.7, augment=0.2)


def diagnosis(**changes: Any) -> Diagnosis:
    usual: dict[str, Any] = {
        "input_per_s": 4000.0,
        "compute_per_s": 1000.0,
        "both_per_s": 950.0,
        "waited": TimeBreakdown(decode=0.01),
        "spent": DECODING,
        "num_ranks": 2,
        "decode_threads": 1,
        "source": "photos",
        "image_size": 224,
        "shorter_side": 375.0,
    }
    return Diagnosis(**usual | changes)


WAITING = {"input_per_s": 800.0, "both_per_s": 700.0, "waited": TimeBreakdown(decode=0.3)}


@pytest.mark.parametrize(
    ("changes", "limit", "remedy"),
    [
        ({}, "compute limits this run: it processes 1,000", "4.0 times as many; input needs no change"),
        (WAITING, "input limits this run: it delivers 800 images/s", "--shorter-side 256"),
        (WAITING | {"shorter_side": 256.0}, "input limits", "more cores (each rank has 1 thread now)"),
        (
            WAITING | {"spent": TimeBreakdown(read=1.0), "shorter_side": 256.0},
            "30% of the time",
            "read takes 100% of input time: megaba",
        ),
        (WAITING | {"spent": TimeBreakdown(copy=1.0)}, "input limits", "copy takes 100%"),
        ({"both_per_s": 700.0}, "competes with input for cores: 1,000 images/s by itself, 700", "decode takes 70%"),
        (
            {"both_per_s": 700.0, "decode_threads": 0, "spent": TimeBreakdown(read=1.0), "shorter_side": None},
            "compute limits this run: it processes 1,000",
            "input needs no change",
        ),
    ],
)
def test_the_verdict_names_the_limit_and_the_remedy(changes: dict[str, Any], limit: str, remedy: str) -> None:
    sentence = advise(diagnosis(**changes))
    assert limit in sentence and remedy in sentence
    assert "\n" not in sentence


READING = WAITING | {"spent": TimeBreakdown(read=1.0), "shorter_side": 256.0}


@pytest.mark.parametrize(
    ("changes", "advised", "not_advised"),
    [
        (WAITING | {"shorter_side": 256.0, "cores": 1}, "more cores", "decode_threads="),
        (WAITING | {"shorter_side": 256.0, "cores": 4}, "run.decode_threads=4", "decode_threads=1"),
        (READING | {"in_tars": True}, "move photos to a faster disk", "megabatch pack"),
        (READING, "megabatch pack photos OUT, then data.source=OUT", "data.source=photos"),
        (READING | {"shorter_side": None, "decode_threads": 0}, "faster disk", "megabatch pack"),
        (WAITING | {"spent": TimeBreakdown(copy=1.0), "num_ranks": 1}, "a smaller data.image_size", "fewer ranks"),
    ],
)
def test_a_remedy_already_applied_is_not_advised(changes: dict[str, Any], advised: str, not_advised: str) -> None:
    sentence = advise(diagnosis(**changes))
    assert advised in sentence and not_advised not in sentence


def test_warnings_about_classes_follow_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_diagnosis(diagnosis(), ("photos has one class",))
    verdict, warning = capsys.readouterr().out.splitlines()[-2:]
    assert verdict.startswith("verdict   ") and warning == "warning   photos has one class"
