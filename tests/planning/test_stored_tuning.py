"""Decoding and validation of a stored tuning."""

from typing import Any, get_args

import msgspec
import pytest

from megabatch.io.reading import Undecodable
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.choosing import all_questions, choose, is_made_for, open_questions, with_measurements
from megabatch.planning.cost import Link
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.topology import Axis, regular
from megabatch.planning.tuning import Tuning, decode_tuning

TOPOLOGY = regular(2, 2)
BACKWARD = RecordedBackward(
    [f"weight {index}" for index in range(4)],
    [Gradient(size, "fp32") for size in (4, 400, 4 << 20, 8 << 20)],
    [0.1, 0.2, 0.3, 0.4],
)
PLANS = [plan for plan in (make(TOPOLOGY.shape, "same") for make in ALGORITHMS.values()) if plan]


def chosen() -> Tuning:
    links = dict.fromkeys(get_args(Axis), Link(1e-4, 1e-9, 1e-10))
    tuning = choose(BACKWARD, PLANS, TOPOLOGY, links, bucket_mb=1.0)
    tuning = with_measurements(tuning, dict.fromkeys(open_questions(tuning), 1e-3))
    return with_measurements(tuning, dict.fromkeys(all_questions(tuning), 1e-3))


def stored() -> dict[str, Any]:
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(chosen()))
    return built


def test_a_tuning_round_trips_through_json() -> None:
    assert decode_tuning(msgspec.json.encode(stored())) == chosen()


INVALID: list[tuple[str, Any, str]] = [
    ("buckets", [], "no buckets"),
    ("buckets.0.candidates", [], "chosen="),
    ("buckets.0.chosen", 3, "chosen=3.*3 candidates"),
    ("buckets.0.chosen", -1, "chosen=-1"),
    ("buckets.0.gradients", [], "no gradients"),
    ("buckets.0.gradients", ["weight 3"], "twice"),
    ("buckets.0.num_elements", -1, "num_elements=-1"),
    ("buckets.0.num_elements", 10**30, "num_elements"),
    ("buckets.0.ready_s", 1e300, "ready_s=1e\\+300"),
    ("buckets.0.candidates.0.costs.0", -1.0, "time outside"),
    ("buckets.0.candidates.0.costs", [0.0, 0.0, 0.0, True], "time outside"),  # a price of 0 with a measurement
    ("buckets.0.candidates.0.plan.phases", [], "not an all-reduce"),
    ("buckets.0.candidates.0.plan.name", "\x1b[31m", "not an all-reduce"),
    ("links", {}, "link that was not measured"),
    ("links.node.alpha_s", -1.0, "link node"),
    ("links.node.beta_s_per_byte", 1e308, "link node"),
    ("backward_s", -1.0, "backward_s=-1"),
    ("caps_mb", [], "caps_mb"),
    ("caps_mb", [1e308], "caps_mb"),
    ("caps_mb", [-1.0], "caps_mb"),
    ("caps_mb", ["1"], "caps_mb"),
    ("topology.nodes", [[0, 2]], "every rank"),
    ("topology.nodes", [], "every rank"),
    ("topology.nodes", [[1, 0]], "ascend"),
]


@pytest.mark.parametrize(("key", "value", "why"), INVALID)
def test_an_invalid_value_is_reported_by_name(key: str, value: Any, why: str) -> None:
    tables = stored()
    *parts, last = key.split(".")
    place: Any = tables
    for part in parts:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    with pytest.raises(Undecodable, match=why):
        decode_tuning(msgspec.json.encode(tables))


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"buckets":' + b"[" * 100_000, b'{"links":{"\xff":1}}'])
def test_content_that_is_not_a_tuning_is_rejected(content: bytes) -> None:
    with pytest.raises(Undecodable):
        decode_tuning(content)


def test_caps_that_do_not_make_the_buckets_do_not_fit_the_run() -> None:
    tuning = chosen()
    assert is_made_for(tuning, TOPOLOGY, BACKWARD, PLANS)
    for caps_mb in ([0.0], [1e-9], [1e6]):
        other = msgspec.structs.replace(tuning, caps_mb=caps_mb)
        assert not is_made_for(other, TOPOLOGY, BACKWARD, PLANS)
