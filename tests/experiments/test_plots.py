import builtins
import itertools
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.experiments.drawing import spread_apart
from megabatch.experiments.evidence import Curve
from megabatch.experiments.plots import Plot, accuracy_limits, draw_plots, focus, mean_curve, shared_points
from tests.support.made_up_study import BASELINE, TRIAL, arm, pair, searched, study, untrained

MADE = study(
    [
        arm(BASELINE, [0.93, 0.931, 0.929]),
        arm(TRIAL, [0.928, 0.929, 0.927]),
        arm("costs $5 & <more>", [0.5, 0.51, None]),
        untrained("later"),
    ]
)


def texts(svg: str) -> str:
    return "\n".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if "text" in node.tag)


@pytest.fixture(scope="module")
def drawings() -> list[Plot]:
    return draw_plots(MADE)


def test_every_plot_is_xml_and_names_its_arms(drawings: list[Plot]) -> None:
    assert [drawing.name for drawing in drawings] == [
        "accuracy",
        "search",
        "training-loss",
        "variance-of-pool5s-output",
    ]
    for drawing in drawings:
        for name in (BASELINE, TRIAL, "costs $5 & <more>"):
            assert name in texts(drawing.svg), (drawing.name, name)
        assert "1 of 3 diverged" in texts(drawing.svg) or drawing.name == "search"
    assert "not run" in texts(drawings[0].svg)


def test_plots_are_reproducible_with_any_user_settings(drawings: list[Plot]) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "svg.hashsalt": None}):
        assert draw_plots(MADE) == drawings
        assert matplotlib.rcParams["font.size"] == 20
    assert "<dc:date>" not in drawings[0].svg


def test_study_with_only_diverged_seeds_can_be_drawn() -> None:
    lost = untrained("lost", [searched(1.0, None)])
    drawings = draw_plots(study([arm(BASELINE, [None, None]), lost]))
    assert "2 of 2 diverged" in texts(drawings[0].svg) and "diverged at every learning rate" in texts(drawings[0].svg)


def test_plots_without_values_are_left_out() -> None:
    assert draw_plots(study([untrained("later")])) == []


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'megabatch\[studies\]'"):
        draw_plots(MADE)


@given(st.lists(st.floats(0, 1), max_size=9))
def test_labels_keep_their_order_and_distance(heights: list[float]) -> None:
    places = spread_apart(heights, 0.1)
    in_order = [places[index] for index in sorted(range(len(heights)), key=heights.__getitem__)]
    assert all(after - before >= 0.1 - 1e-9 for before, after in itertools.pairwise(in_order))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_distant_labels_do_not_move() -> None:
    assert spread_apart([0.9, 0.1, 0.5], 0.1) == [0.9, 0.1, 0.5]


def test_mean_needs_a_value_of_every_seed() -> None:
    curves: list[Curve] = [[(1.0, 0.2), (2.0, None), (3.0, 0.6)], [(1.0, 0.4), (2.0, 0.5), (3.0, 0.8), (4.0, 0.9)]]
    assert shared_points(curves) == [(1.0, [0.2, 0.4]), (3.0, [0.6, 0.8])]
    assert [(x, round(y or math.nan, 9)) for x, y in mean_curve(curves)] == [(1.0, 0.3), (3.0, 0.7)]


def test_axis_ignores_values_far_below_the_best() -> None:
    low, high = accuracy_limits(pair([0.93, 0.931, 0.929], [0.1, 0.11, 0.12]))
    assert 92 < low < 92.9 and 93.1 < high < 94
    low, high = accuracy_limits(pair([0.93, 0.90], [0.92, 0.92]))  # two seeds: t is 12.7
    assert low < 90 and 93 < high < 98.5
    values, results = [10.0, 50.0, 90.0, 93.0], [93.0, 92.0, 50.0]
    assert focus(values, results, most=15.0, context=3.0) == pytest.approx((89.85, 93.15))
    assert focus(values, results, most=50.0, context=3.0) == pytest.approx((47.85, 95.15))
