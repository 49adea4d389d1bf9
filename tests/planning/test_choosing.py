"""The choice of buckets and plans, from made-up links and times."""

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.buckets import MIB, ddp_buckets
from megabatch.planning.choosing import (
    MEASURED_ELEMENTS,
    STREAM,
    Question,
    all_questions,
    choose,
    confirm,
    drift,
    is_made_for,
    open_questions,
    price,
    with_measurements,
)
from megabatch.planning.cost import Link, seconds
from megabatch.planning.pipeline import PART_BYTES, Gradient, GradientDtype, RecordedBackward, pass_through
from megabatch.planning.plan import CommDtype, Plan
from megabatch.planning.topology import Axis, Topology, regular
from megabatch.planning.tuning import Tuning

TOPOLOGY = regular(2, 2)
SHAPE = TOPOLOGY.shape
# One connection between leaders has less latency than two between nodes, which have more bandwidth.
LINKS: dict[Axis, Link] = {
    "all": Link(2e-3, 1 / 60e6, 0.0),
    "node": Link(5e-5, 1 / 5e9, 1 / 5e9),
    "leaders": Link(5e-4, 1 / 60e6, 0.0),
    "inter_node": Link(2e-3, 1 / 60e6, 0.0),
}
SMALL, LARGE = Gradient(4 << 10, "fp32"), Gradient(4 * MIB, "fp32")


def plans(dtype: CommDtype = "same", topology: Topology = TOPOLOGY) -> list[Plan]:
    return [plan for algorithm in ALGORITHMS.values() if (plan := algorithm(topology.shape, dtype))]


def backward_of(gradients: list[Gradient], ready_s: list[float] | None = None) -> RecordedBackward:
    names = [f"weight {index}" for index in range(len(gradients))]
    return RecordedBackward(names, gradients, ready_s or [0.0] * len(gradients))


def tune(
    gradients: list[Gradient],
    ready_s: list[float] | None = None,
    bucket_mb: float | None = None,
    links: dict[Axis, Link] = LINKS,
) -> Tuning:
    return choose(backward_of(gradients, ready_s), plans(), TOPOLOGY, links, bucket_mb=bucket_mb)


def answered(tuning: Tuning, seconds_of: Callable[[Question], float]) -> Tuning:
    """Answer each open question with `seconds_of` per all-reduce."""
    return with_measurements(tuning, {asked: asked.count * seconds_of(asked) for asked in open_questions(tuning)})


def test_parts_of_a_large_bucket_overlap_node_and_network() -> None:
    for plan in plans():
        one = price(plan, SHAPE, LINKS, PART_BYTES // 4)
        assert sum(one[:3]) == pytest.approx(seconds(plan, SHAPE, PART_BYTES // 4, LINKS))
        ten = price(plan, SHAPE, LINKS, 10 * PART_BYTES // 4)
        assert (ten.before_s, ten.after_s) == (one.before_s, one.after_s)
        assert ten.crossing_s == pytest.approx(10 * one.crossing_s)  # the network is the slower of the two here


def test_small_buckets_use_hierarchical_and_large_ones_torus() -> None:
    tuning = tune([SMALL, LARGE, SMALL], bucket_mb=4.0)
    assert [bucket.gradients for bucket in tuning.buckets] == [["weight 0"], ["weight 1"], ["weight 2"]]
    assert [bucket.plan.name for bucket in tuning.buckets] == ["hierarchical", "torus", "hierarchical"]
    assert tuning.algorithms == "hierarchical+torus"


gradient_sets = st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 30)), min_size=1, max_size=6)


@given(gradient_sets)
def test_no_simple_cut_or_plan_ends_sooner(found: list[tuple[int, int]]) -> None:
    gradients = [Gradient(4 * size, "fp32") for size, _ in found]
    ready_s = list(itertools.accumulate(gap / 1e3 for _, gap in found))
    tuning = tune(gradients, ready_s)
    ends_s = []
    for cuts in itertools.product([False, True], repeat=len(found) - 1):
        bounds = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(found)]
        sizes = [sum(size for size, _ in found[begin:end]) for begin, end in itertools.pairwise(bounds)]
        prices = [[price(plan, SHAPE, LINKS, size) for plan in plans()] for size in sizes]
        readies_s = [ready_s[end - 1] for end in bounds[1:]]
        ends_s += [pass_through(readies_s, costs)[-1].end_s for costs in itertools.product(*prices)]
    # Grain, width and the preference for few buckets may cost a little.
    assert min(ends_s) * (1 - 1e-9) <= tuning.predicted_s <= min(ends_s) * 1.02


@given(gradient_sets)
def test_every_gradient_is_in_one_bucket_and_plans_keep_the_dtype(found: list[tuple[int, int]]) -> None:
    backward = backward_of([Gradient(4 * size, "fp32") for size, _ in found])
    tuning = choose(backward, plans("bf16"), TOPOLOGY, LINKS, bucket_mb=None)
    assert [name for bucket in tuning.buckets for name in bucket.gradients] == backward.names
    assert sum(b.num_bytes for b in tuning.buckets) == sum(gradient.num_bytes for gradient in backward.gradients)
    used = [phase for bucket in tuning.buckets for c in bucket.candidates for phase in c.plan.phases]
    assert {phase.dtype for phase in used if phase.axis != "node"} == {"bf16"}


some_gradients = st.lists(
    st.builds(lambda size, dtype: Gradient(8 * size, dtype), st.integers(1, MIB), st.sampled_from(["fp32", "bf16"])),
    min_size=1,
    max_size=8,
)


@given(gradients=some_gradients, bucket_mb=st.none() | st.sampled_from([0.5, 4.0]))
def test_ddp_makes_the_chosen_buckets_with_the_caps(gradients: list[Gradient], bucket_mb: float | None) -> None:
    """These are the chosen buckets, or those of one cap if several dtypes have no common caps."""
    backward = backward_of(gradients)
    tuning = tune(gradients, bucket_mb=bucket_mb)
    made = ddp_buckets(gradients, [int(cap * MIB) for cap in tuning.caps_mb])
    cut = [[backward.names.index(name) for name in bucket.gradients] for bucket in tuning.buckets]
    assert sorted(made) == sorted(cut)
    for bucket, indices in zip(tuning.buckets, cut, strict=True):
        assert {gradients[index].dtype for index in indices} == {bucket.dtype}
        assert bucket.num_bytes == sum(gradients[index].num_bytes for index in indices)


def test_dtypes_without_common_caps_are_cut_as_ddp_does() -> None:
    # Fused up to 8: [5, 3], [7] and [4], [6].  A first cap of 4 would part 5 and 3, one of 8 would join 4 and 6.
    sizes: list[tuple[int, GradientDtype]] = [(5, "fp32"), (4, "bf16"), (3, "fp32"), (7, "fp32"), (6, "bf16")]
    gradients = [Gradient(size * MIB // 8, dtype) for size, dtype in sizes]
    tuning = tune(gradients, bucket_mb=1.0)
    assert tuning.caps_mb == [1.0]
    assert [[int(name[-1]) for name in bucket.gradients] for bucket in tuning.buckets] == [[0, 2], [1, 4], [3]]


def test_buckets_on_one_node_have_25_mb_by_default() -> None:
    within = regular(1, 2)
    backward = backward_of([Gradient(10 * MIB, "fp32")] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])

    def sizes(bucket_mb: float | None) -> list[int]:
        tuning = choose(backward, plans("same", within)[2:], within, LINKS, bucket_mb=bucket_mb)
        return [bucket.num_bytes // MIB for bucket in tuning.buckets]

    assert sizes(None) == [20, 20, 10]
    assert sizes(30.0) == [30, 20]


def test_close_prices_are_measured_and_the_measurement_decides() -> None:
    tuning = tune([Gradient(300 << 10, "fp32")])
    asked = open_questions(tuning)
    assert [question.plan.name for question in asked] == ["hierarchical", "torus"]
    for winner in asked:
        taken_s = {question: 0.1 if question == winner else 0.2 for question in asked}
        measured = answered(tuning, taken_s.__getitem__)
        bucket = confirm(measured).buckets[0]
        assert bucket.plan == winner.plan
        assert "measured" in bucket.reason and "100 % longer" in bucket.reason
        assert confirm(measured).predicted_s == pytest.approx(0.1)
        assert open_questions(measured) == []


def test_two_plans_are_used_only_if_that_exposes_less() -> None:
    # At this size the prices of hierarchical and torus are close; one element more is another question.
    first, second = Gradient(4 * 76_800, "fp32"), Gradient(4 * 76_801, "fp32")
    tuning = tune([first, second], bucket_mb=0.3)
    here, there = plans()[1:]

    def chosen(second_s: float) -> list[Plan]:
        taken_s = {(here, 76_800): 1.0, (there, 76_800): second_s, (here, 76_801): 1.4, (there, 76_801): 1.0}
        measured = answered(tuning, lambda question: taken_s[question.plan, question.num_elements])
        return [bucket.plan for bucket in confirm(measured).buckets]

    assert chosen(1.1) == [there, there]
    assert chosen(1.6) == [here, there]


def test_a_forced_algorithm_is_given_as_the_reason() -> None:
    tuning = choose(backward_of([LARGE]), plans()[:1], TOPOLOGY, LINKS, bucket_mb=None, forced="it was asked for")
    assert tuning.buckets[0].reason == "it was asked for"
    assert confirm(answered(tuning, lambda _: 0.1)).buckets[0].reason == "it was asked for"


def test_a_single_close_plan_that_crosses_is_measured_and_stays() -> None:
    crossing = choose(backward_of([LARGE]), plans()[:1], TOPOLOGY, LINKS, bucket_mb=None)
    assert [question.plan for question in open_questions(crossing)] == plans()[:1]
    links = {**LINKS, "all": Link(2e-3, 1e-6, 0.0), "leaders": Link(5e-4, 1e-6, 0.0)}
    apart = tune([Gradient(64 * MIB, "fp32")], links=links)
    assert [question.plan for question in open_questions(apart)] == [apart.buckets[0].plan]
    measured = confirm(answered(apart, lambda _: 3.0))
    assert measured.buckets[0].plan == apart.buckets[0].plan
    assert measured.predicted_s == pytest.approx(3.0)
    within = regular(1, 2)
    in_node = choose(backward_of([LARGE]), plans("same", within)[2:], within, LINKS, bucket_mb=None)
    assert open_questions(in_node) == []


def test_buckets_of_one_size_share_a_question_and_small_ones_are_measured_in_a_row() -> None:
    size = 300 << 10
    tuning = tune([Gradient(size, "fp32")] * 3, bucket_mb=size / MIB)
    asked = open_questions(tuning)
    assert len(tuning.buckets) == 3
    assert [(question.plan.name, *question[1:]) for question in asked] == [
        ("hierarchical", size // 4, "fp32", STREAM),
        ("torus", size // 4, "fp32", STREAM),
    ]
    for bucket in answered(tuning, lambda question: 0.1 if question.plan == asked[0].plan else 0.2).buckets:
        assert [candidate.measured_s for candidate in bucket.candidates] == [None, 0.1, 0.2]
    large, just_small = (tune([Gradient(num_bytes, "fp32")]) for num_bytes in (PART_BYTES + 4, PART_BYTES))
    assert {question.count for question in open_questions(large)} == {1}
    assert {question.count for question in open_questions(just_small)} == {STREAM}


def test_a_huge_bucket_is_measured_smaller_and_scaled_by_price() -> None:
    tuning = tune([Gradient(4 * 3 * MEASURED_ELEMENTS, "fp32")])
    assert {question.num_elements for question in open_questions(tuning)} == {MEASURED_ELEMENTS}
    # If the smaller measurement takes its predicted time, so does the bucket.
    measured = answered(tuning, lambda question: sum(price(question.plan, SHAPE, LINKS, MEASURED_ELEMENTS)[:3]))
    for before, after in zip(tuning.buckets[0].candidates, measured.buckets[0].candidates, strict=True):
        if after.measured_s is not None:
            assert after.measured_s == pytest.approx(before.predicted_s)
    # The network is the bottleneck, so three times the bytes take three times as long.
    doubled = answered(tuning, lambda question: 2.0)
    assert doubled.buckets[0].candidate.measured_s == pytest.approx(6.0, rel=0.01)


def test_remaining_questions_can_be_measured_and_earlier_answers_stay() -> None:
    tuning = tune([SMALL, LARGE, Gradient(300 << 10, "fp32")], bucket_mb=4.0)
    confirmed = confirm(answered(tuning, lambda _: 0.1))
    left = all_questions(confirmed)
    assert left and not set(left) & set(open_questions(tuning))
    everything = with_measurements(confirmed, dict.fromkeys(left, 8.0))
    for before, after in zip(confirmed.buckets, everything.buckets, strict=True):
        assert after.chosen == before.chosen
        for old, new in zip(before.candidates, after.candidates, strict=True):
            assert new.measured_s is not None
            assert old.measured_s is None or new.measured_s == old.measured_s
    assert all_questions(everything) == []
    alone = choose(backward_of([LARGE]), plans("same", regular(1, 1))[:1], regular(1, 1), {}, bucket_mb=None)
    assert all_questions(alone) == open_questions(alone) == []


def test_a_bucket_decided_by_price_ignores_measurements_for_another() -> None:
    """Merging may give buckets of one size different plans to leave node or network free for others."""
    tuning = tune([LARGE, LARGE], bucket_mb=4.0, links={**LINKS, "all": Link(2e-3, 1e-6, 0.0)})
    # Then only the chosen candidate of each is undecided.
    clear, dear = (
        msgspec.structs.replace(
            bucket,
            chosen=chosen,
            candidates=[
                msgspec.structs.replace(candidate, costs=candidate.costs._replace(crossing_s=crossing_s))
                for candidate, crossing_s in zip(bucket.candidates, (9.0, 3.0, 1.0), strict=True)
            ],
        )
        for bucket, chosen in zip(tuning.buckets, (2, 1), strict=True)
    )
    tuning = msgspec.structs.replace(tuning, buckets=[clear, dear])
    measured = answered(tuning, lambda _: 1.0)
    assert [bucket.measured_places for bucket in measured.buckets] == [{2}, {1}]
    assert [bucket.chosen for bucket in confirm(measured).buckets] == [2, 1]


def test_drift_is_the_ratio_of_predicted_times() -> None:
    tuning = tune([LARGE])
    slower = {axis: Link(*(3 * value for value in msgspec.structs.astuple(link))) for axis, link in LINKS.items()}
    assert drift(tuning, LINKS) == 1
    assert drift(tuning, slower) == pytest.approx(3)


def test_whole_buckets_do_not_overlap_node_and_network() -> None:
    """This holds for the choice, the scaling of a measurement, and drift."""
    num_elements, gradients = 4 * MEASURED_ELEMENTS, [Gradient(16 * MEASURED_ELEMENTS, "fp32")]
    tuning = choose(backward_of(gradients), plans(), TOPOLOGY, LINKS, bucket_mb=None, in_parts=False)
    (bucket,) = tuning.buckets
    assert not tuning.in_parts
    for candidate in bucket.candidates:
        assert candidate.predicted_s == pytest.approx(seconds(candidate.plan, SHAPE, num_elements, LINKS))
    (measured,) = answered(tuning, lambda asked: 1.0).buckets
    for candidate in measured.candidates:
        if candidate.measured_s is not None:
            smaller_s = seconds(candidate.plan, SHAPE, MEASURED_ELEMENTS, LINKS)
            assert candidate.measured_s == pytest.approx(candidate.predicted_s / smaller_s)
    node = LINKS["node"]
    slower = {**LINKS, "node": Link(2 * node.alpha_s, 2 * node.beta_s_per_byte, 2 * node.gamma_s_per_byte)}
    ratio = seconds(bucket.plan, SHAPE, num_elements, slower) / seconds(bucket.plan, SHAPE, num_elements, LINKS)
    assert drift(tuning, slower) == pytest.approx(ratio)


def test_exposed_time_counts_only_after_backward() -> None:
    tuning = tune([LARGE, LARGE], [0.0, 10.0])
    assert tuning.backward_s == 10.0
    # The first is done long before, so the second takes as long as without others.
    assert tuning.exposed_s == pytest.approx(tune([LARGE]).predicted_s)


def test_a_stored_tuning_fits_only_its_ranks_gradients_and_plans() -> None:
    gradients = [SMALL, LARGE, SMALL]
    backward, candidates = backward_of(gradients), plans()
    tuning = tune(gradients, bucket_mb=4.0)
    assert is_made_for(tuning, TOPOLOGY, backward, candidates)
    assert is_made_for(tuning, TOPOLOGY, backward._replace(ready_s=[1.0, 2.0, 3.0]), candidates)
    reversed_backward = RecordedBackward(backward.names[::-1], backward.gradients[::-1], backward.ready_s[::-1])
    assert is_made_for(tuning, TOPOLOGY, reversed_backward, candidates)
    assert not is_made_for(tuning, regular(4, 1), backward, candidates)
    assert not is_made_for(tuning, TOPOLOGY, backward, candidates[:2])
    assert not is_made_for(tuning, TOPOLOGY, backward, plans("bf16"))
    others = [
        backward_of([SMALL, LARGE]),
        backward_of([*gradients, SMALL]),
        backward_of([SMALL, Gradient(8 * MIB, "fp32"), SMALL]),
        backward_of([SMALL, Gradient(4 * MIB, "fp64"), SMALL]),
        backward._replace(names=["weight 0", "weight 1", "bias"]),
    ]
    assert not any(is_made_for(tuning, TOPOLOGY, other, candidates) for other in others)
