"""The choice of fusion and plans, from links and times that are made up."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.buckets import MIB, Gradient
from megabatch.planning.cost import Link, Timing, fit_link, group_seconds, seconds
from megabatch.planning.pipeline import PART_BYTES, pass_through
from megabatch.planning.plan import Phase, Plan, Wire
from megabatch.planning.topology import Axis, regular
from megabatch.planning.tuning import CLOSE, Tuning, choose, confirm, drift, open_questions, price, with_measurements

TOPOLOGY = regular(2, 2)
# One connection between masters starts sooner than two across, which carry more together.
LINKS: dict[Axis, Link] = {
    "all": Link(2e-3, 1 / 60e6, 0.0),
    "node": Link(5e-5, 1 / 5e9, 1 / 5e9),
    "masters": Link(5e-4, 1 / 60e6, 0.0),
    "across": Link(2e-3, 1 / 60e6, 0.0),
}
SMALL, LARGE = Gradient(4 << 10, "torch.float32"), Gradient(4 * MIB, "torch.float32")
times = st.floats(1e-6, 1.0)


def plans(wire: Wire = "fp32") -> list[Plan]:
    return [plan for algorithm in ALGORITHMS.values() if (plan := algorithm(TOPOLOGY, wire))]


def tune(gradients: list[Gradient], ready_s: list[float], cut: list[list[int]] | None = None) -> Tuning:
    names = [f"weight {index}" for index in range(len(gradients))]
    return choose(names, gradients, ready_s, plans(), TOPOLOGY, LINKS, cut)


@given(
    alpha_s=st.floats(1e-7, 1e-2),
    beta_s=st.floats(1e-12, 1e-6),
    gamma_s=st.floats(0.0, 1e-6),
    num_members=st.integers(2, 9),
    blocks=st.integers(100, 5000),
    wire=st.sampled_from(["fp32", "bf16"]),
    num_halves=st.sampled_from([1, 2]),
)
def test_a_fitted_link_costs_what_was_measured(
    alpha_s: float, beta_s: float, gamma_s: float, num_members: int, blocks: int, wire: Wire, num_halves: int
) -> None:
    link, num_elements = Link(alpha_s, beta_s, gamma_s), 16 * blocks * num_members
    summed = Phase("all_reduce" if num_halves == 2 else "reduce_scatter", "across", wire)
    timing = Timing(
        small_s=num_halves * (num_members - 1) * alpha_s,
        gather_s=group_seconds(Phase("all_gather", "across", wire), num_members, num_elements, link, 4),
        sum_s=group_seconds(summed, num_members, num_elements, link, 4),
        num_halves=num_halves,
    )
    fitted = fit_link(timing, num_members, num_elements, wire_bytes=4 if wire == "fp32" else 2)
    again_s = group_seconds(summed, num_members, num_elements, fitted, 4)
    assert again_s == pytest.approx(timing.sum_s, rel=1e-6)
    assert fitted.beta_s_per_byte == pytest.approx(beta_s, rel=1e-4, abs=1e-15)


@given(small_s=times, gather_s=times, sum_s=times, num_members=st.integers(2, 9))
def test_no_noise_makes_a_link_negative(small_s: float, gather_s: float, sum_s: float, num_members: int) -> None:
    link = fit_link(Timing(small_s, gather_s, sum_s, 2), num_members, 1 << 20, wire_bytes=4)
    assert link.alpha_s > 0 and link.beta_s_per_byte >= 0 and link.gamma_s_per_byte >= 0
    phase = Phase("all_reduce", "across", "fp32")
    assert group_seconds(phase, num_members, 1 << 20, link, 4) >= min(sum_s, small_s) * (1 - 1e-9)


def test_a_bucket_of_one_part_costs_its_phases_and_a_large_one_hides_the_node_under_the_network() -> None:
    for plan in plans():
        one = price(plan, TOPOLOGY, LINKS, PART_BYTES // 4)
        assert sum(one[:3]) == pytest.approx(seconds(plan, TOPOLOGY, PART_BYTES // 4, LINKS))
        ten = price(plan, TOPOLOGY, LINKS, 10 * PART_BYTES // 4)
        assert (ten.before_s, ten.after_s) == (one.before_s, one.after_s)
        assert ten.crossing_s == pytest.approx(10 * one.crossing_s)  # the network is the slower of the two here


def test_small_buckets_go_over_masters_and_large_ones_across() -> None:
    tuning = tune([SMALL, LARGE, SMALL], [0.0, 0.0, 0.0], cut=[[0], [1], [2]])
    assert [bucket.plan.name for bucket in tuning.buckets] == ["hierarchical/fp32", "torus/fp32", "hierarchical/fp32"]
    assert tuning.algorithms == "hierarchical/fp32+torus/fp32"


gradient_sets = st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 30)), min_size=1, max_size=6)


@given(gradient_sets)
def test_no_other_cut_or_plan_ends_sooner(found: list[tuple[int, int]]) -> None:
    gradients = [Gradient(4 * size, "torch.float32") for size, _ in found]
    ready_s = list(itertools.accumulate(gap / 1e3 for _, gap in found))
    tuning = tune(gradients, ready_s)
    ends_s = []
    for cuts in itertools.product([False, True], repeat=len(found) - 1):
        bounds = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(found)]
        sizes = [sum(size for size, _ in found[begin:end]) for begin, end in itertools.pairwise(bounds)]
        prices = [[price(plan, TOPOLOGY, LINKS, size) for plan in plans()] for size in sizes]
        readies_s = [ready_s[end - 1] for end in bounds[1:]]
        ends_s += [pass_through(readies_s, costs)[-1].end_s for costs in itertools.product(*prices)]
    # Grain and width of the search, and the wish for few buckets, may cost a little.
    assert min(ends_s) * (1 - 1e-9) <= tuning.predicted_s <= min(ends_s) * 1.02


@given(gradient_sets)
def test_every_gradient_is_in_one_bucket_and_no_plan_has_another_wire(found: list[tuple[int, int]]) -> None:
    gradients = [Gradient(4 * size, "torch.float32") for size, _ in found]
    names = [str(index) for index in range(len(found))]
    tuning = choose(names, gradients, [0.0] * len(found), plans("bf16"), TOPOLOGY, LINKS)
    assert [name for bucket in tuning.buckets for name in bucket.gradients] == names
    assert sum(bucket.num_bytes for bucket in tuning.buckets) == sum(gradient.num_bytes for gradient in gradients)
    used = [phase for bucket in tuning.buckets for c in bucket.candidates for phase in c.plan.phases]
    assert {phase.wire for phase in used if phase.axis != "node"} == {"bf16"}


def test_what_comes_close_is_measured_and_the_measurement_decides() -> None:
    tuning = tune([Gradient(300 << 10, "torch.float32")], [0.0])
    predicted_s = [candidate.predicted_s for candidate in tuning.buckets[0].candidates]
    calls = open_questions(tuning)
    assert calls == [(0, place) for place, s in enumerate(predicted_s) if s <= CLOSE * min(predicted_s)]
    assert len(calls) > 1
    for winner in calls:
        measured = with_measurements(tuning, {call: 0.1 if call == winner else 0.2 for call in calls})
        bucket = confirm(measured).buckets[0]
        assert bucket.chosen == winner[1]
        assert "measured" in bucket.reason and "100 % longer" in bucket.reason
        assert confirm(measured).predicted_s == pytest.approx(0.1)


def test_two_plans_are_taken_only_where_that_exposes_less() -> None:
    tuning = tune([LARGE, LARGE], [0.0, 0.0], cut=[[0], [1]])
    here, there = 1, 2

    def chosen(second_s: float) -> list[int]:
        measured_s = {(0, here): 1.0, (0, there): second_s, (1, here): 1.4, (1, there): 1.0}
        return [bucket.chosen for bucket in confirm(with_measurements(tuning, measured_s)).buckets]

    assert chosen(1.1) == [there, there]
    assert chosen(1.6) == [here, there]


def test_a_forced_algorithm_is_the_reason() -> None:
    tuning = choose(["w"], [LARGE], [0.0], plans()[:1], TOPOLOGY, LINKS, forced="comm.algorithm=flat")
    assert tuning.buckets[0].reason == "comm.algorithm=flat"
    assert confirm(with_measurements(tuning, {(0, 0): 0.1})).buckets[0].reason == "comm.algorithm=flat"


def test_what_crosses_alone_is_measured_for_the_prediction_and_stays_the_choice() -> None:
    crossing = choose(["w"], [LARGE], [0.0], plans()[:1], TOPOLOGY, LINKS)
    assert open_questions(crossing) == [(0, 0)]
    links = {**LINKS, "all": Link(2e-3, 1e-6, 0.0), "masters": Link(5e-4, 1e-6, 0.0)}
    apart = choose(["w"], [Gradient(64 * MIB, "torch.float32")], [0.0], plans(), TOPOLOGY, links)
    questions = open_questions(apart)
    assert questions == [(0, apart.buckets[0].chosen)]
    measured = confirm(with_measurements(apart, {questions[0]: 3.0}))
    assert measured.buckets[0].plan == apart.buckets[0].plan
    assert measured.predicted_s == pytest.approx(3.0)
    within = regular(1, 2)
    in_node = choose(["w"], [LARGE], [0.0], [ALGORITHMS["torus"](within, "fp32")], within, LINKS)
    assert open_questions(in_node) == []


def test_a_tuning_survives_its_file() -> None:
    tuning = tune([SMALL, LARGE], [0.01, 0.02])
    assert msgspec.json.decode(msgspec.json.encode(tuning), type=Tuning) == tuning


def test_drift_is_how_much_longer_sums_take() -> None:
    tuning = tune([LARGE], [0.0])
    slower = {axis: Link(*(3 * value for value in msgspec.structs.astuple(link))) for axis, link in LINKS.items()}
    assert drift(tuning, LINKS) == 1
    assert drift(tuning, slower) == pytest.approx(3)


def test_exposed_is_what_is_left_after_backward() -> None:
    tuning = tune([LARGE, LARGE], [0.0, 10.0])
    assert tuning.backward_s == 10.0
    assert tuning.exposed_s == pytest.approx(tuning.predicted_s - 10.0)
    assert 0 < tuning.exposed_s < 2 * min(c.predicted_s for c in tuning.buckets[-1].candidates)
