from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.simulate.profile import Profile, fit_line, layer_times, read_profile


def made_up(seconds: dict[int, float]) -> dict[str, Any]:
    """Return a profile with these forward times by microbatch; backward takes twice as long."""
    return {
        "format": 1,
        "model": "made_up",
        "image_size": 32,
        "num_classes": 10,
        "precision": "bf16",
        "device": "a CPU",
        "threads": 2,
        "gradients": [
            {"name": "head.bias", "num_elements": 10, "dtype": "bf16"},
            {"name": "head.weight", "num_elements": 50, "dtype": "bf16"},
            {"name": "norm.weight", "num_elements": 3, "dtype": "fp32"},
        ],
        "points": [
            {
                "microbatch": microbatch,
                "forward_s": forward_s,
                "backward_s": 2 * forward_s,
                "forward_by_layer_s": {"norm": 0.5 * forward_s, "pool": 0.1 * forward_s, "head": 0.4 * forward_s},
                "ready_s": [0.5 * forward_s, 0.75 * forward_s, 2 * forward_s],
            }
            for microbatch, forward_s in seconds.items()
        ],
        "update_s": 0.25,
    }


def profile_of(seconds: dict[int, float]) -> Profile:
    return msgspec.convert(made_up(seconds), Profile)


def test_recorded_times_are_returned_unchanged() -> None:
    profile = profile_of({2: 0.7, 4: 0.9, 8: 2.5})
    assert [profile.forward_s(size) for size in (2, 4, 8)] == [0.7, 0.9, 2.5]
    assert [profile.backward_s(size) for size in (2, 4, 8)] == [1.4, 1.8, 5.0]
    backward = profile.backward(4)
    assert backward.names == ["head.bias", "head.weight", "norm.weight"]
    assert backward.gradients == [(20, "bf16"), (100, "bf16"), (12, "fp32")]
    assert backward.ready_s == profile.points[1].ready_s


def test_other_microbatches_follow_the_fitted_line() -> None:
    profile = profile_of({size: 0.5 + 0.125 * size for size in (4, 8, 16)})
    assert profile.forward_line == pytest.approx((0.5, 0.125))
    for microbatch in (1, 6, 64):
        expected_s = 0.5 + 0.125 * microbatch
        assert profile.forward_s(microbatch) == pytest.approx(expected_s)
        assert profile.backward_s(microbatch) == pytest.approx(2 * expected_s)
        assert profile.backward(microbatch).ready_s == pytest.approx(
            [0.5 * expected_s, 0.75 * expected_s, 2 * expected_s]
        )


times = st.floats(1e-6, 1e3)


@given(times, times, times, st.floats(-1, 1), st.floats(-1, 1))
def test_the_fit_is_the_nearest_nonnegative_line(
    quarter_s: float, half_s: float, whole_s: float, more_fixed: float, more_per_image: float
) -> None:
    recorded = {4: quarter_s, 8: half_s, 16: whole_s}

    def distance(fixed_s: float, per_image_s: float) -> float:
        return sum(((fixed_s + per_image_s * size - time_s) / size) ** 2 for size, time_s in recorded.items())

    best = fit_line(list(recorded), list(recorded.values()))
    other = max(0.0, best.fixed_s + more_fixed), max(0.0, best.per_image_s + more_per_image)
    assert min(best) >= 0
    assert distance(*best) <= distance(*other) * (1 + 1e-9) + 1e-12


@given(times, times, times, st.integers(1, 4096))
def test_gradients_are_ready_in_order_within_backward_at_any_microbatch(
    quarter_s: float, half_s: float, whole_s: float, microbatch: int
) -> None:
    profile = profile_of({4: quarter_s, 8: half_s, 16: whole_s})
    backward = profile.backward(microbatch)
    assert list(backward.ready_s) == sorted(backward.ready_s)
    assert backward.ready_s[0] >= 0
    assert backward.ready_s[-1] <= profile.backward_s(microbatch)


def test_layer_times_add_up_to_forward_and_backward() -> None:
    profile = profile_of({4: 1.0, 8: 2.0})
    layers = {layer.name: layer for layer in layer_times(profile, profile.points[0])}
    assert list(layers) == ["norm", "pool", "head"]
    assert layers["head"] == pytest.approx(("head", 0.4, 0.75, 60))
    assert layers["pool"] == ("pool", 0.1, 0.0, 0)
    assert layers["norm"] == pytest.approx(("norm", 0.5, 1.25, 3))


def test_a_profile_round_trips_through_its_file(tmp_path: Path) -> None:
    profile = profile_of({4: 1.0, 8: 2.0})
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    assert read_profile(path) == profile


def changed(place: tuple[str | int, ...], value: Any) -> bytes:
    document = made_up({4: 1.0, 8: 2.0})
    *parents, last = place
    member: Any = document
    for key in parents:
        member = member[key]
    member[last] = value
    return msgspec.json.encode(document)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a profile"),
        (b"\xff\xfe", "is not a profile"),
        (b"[]", "is not a profile"),
        (b"{}", "is not a profile .*`format`"),
        (changed(("format",), 2), "has format 2.*reads 1"),
        (changed(("update_s",), -1.0), r"is not a profile .*\$.update_s"),
        (changed(("points", 0, "forward_s"), -0.5), r"\$.points\[0\].forward_s"),
        (changed(("points", 0, "forward_s"), 1e300), r"\$.points\[0\].forward_s"),
        (changed(("points", 1, "backward_s"), 0.0), "none after backward_s=0"),
        (changed(("points", 1, "microbatch"), 4), r"microbatches \[4, 4\]: expected at least two, ascending"),
        (changed(("points", 1, "microbatch"), 0), r"\$.points\[1\].microbatch"),
        (changed(("points",), []), r"microbatches \[\]: expected at least two"),
        (changed(("points", 0, "ready_s"), [0.1]), "at microbatch 4: expected 3 ascending"),
        (changed(("points", 0, "ready_s"), [0.3, 0.2, 0.4]), "at microbatch 4: expected 3 ascending"),
        (changed(("gradients", 0, "name"), "head.weight"), "3 gradients of 2 names"),
        (changed(("gradients", 0, "num_elements"), 0), "num_elements"),
        (changed(("gradients", 0, "dtype"), "int8"), "dtype"),
    ],
)
def test_an_invalid_profile_is_rejected_in_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected) as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)
    assert "megabatch profile RECIPE" in str(refused.value)


def test_a_missing_file_gives_a_message_of_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(UserError, match=r"cannot be read .*megabatch profile RECIPE"):
            read_profile(path)
