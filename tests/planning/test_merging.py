import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megabatch.planning.buckets import MIB, MergedBucket, Price, find_cuts, fuse, merge
from megabatch.planning.pipeline import Costs, Gradient, GradientDtype, pass_through

EXACT: dict[str, Any] = {"grain": 0.0, "width": None, "tolerance": 0.0}
DTYPES: tuple[GradientDtype, ...] = ("fp32", "bf16", "fp16")


class TimedStep(NamedTuple):
    gradients: list[Gradient]
    ready_s: list[float]


def steps(dtypes: Sequence[GradientDtype], most_gradients: int, most_bytes: int = 8) -> st.SearchStrategy[TimedStep]:
    """Generate whole seconds, so that sums are exact in any order."""
    gradient = st.builds(Gradient, st.integers(1, most_bytes), st.sampled_from(dtypes))
    timed = st.lists(st.tuples(gradient, st.integers(0, 60)), min_size=1, max_size=most_gradients)
    return timed.map(lambda pairs: TimedStep([g for g, _ in pairs], sorted(float(ready) for _, ready in pairs)))


def step_of(sizes: list[int], ready_s: list[float]) -> TimedStep:
    return TimedStep([Gradient(size, "fp32") for size in sizes], ready_s)


def any_price(seed: int, num_options: int) -> Price:
    """Return random prices that grow with the bucket, so that cutting can pay."""

    def price(num_bytes: int, dtype: GradientDtype) -> list[Costs]:
        generator = random.Random(f"{seed} {num_bytes} {'abc'[DTYPES.index(dtype)]}")
        parts = [[float(generator.choice([0, 0, 1, 2, 3]) * num_bytes) for _ in range(3)] for _ in range(num_options)]
        latency_s = generator.choice([0.0, 1.0, 4.0])
        return [
            Costs(before_s, latency_s + crossing_s, after_s, True)
            if generator.random() < 0.8
            else Costs(before_s + crossing_s, 0.0, 0.0, False)
            for before_s, crossing_s, after_s in parts
        ]

    return price


prices = st.builds(any_price, st.integers(0, 2**31), st.integers(1, 3))


def linear_price(*options: tuple[float, float, float]) -> Price:
    """Return prices by (network latency, network seconds per byte, node seconds per byte)."""

    def price(num_bytes: int, dtype: GradientDtype) -> list[Costs]:
        return [
            Costs(node * num_bytes, latency + beta * num_bytes, node * num_bytes, True)
            for latency, beta, node in options
        ]

    return price


def end_s(ready_s: Sequence[float], costs: Sequence[Costs]) -> float:
    return max(passage.end_s for passage in pass_through(ready_s, costs))


def end_of(merged: list[MergedBucket]) -> float:
    return end_s([bucket.ready_s for bucket in merged], [bucket.costs for bucket in merged])


def every_cut(gradients: list[Gradient]) -> Iterator[list[list[int]]]:
    inner = range(1, len(gradients))
    for cuts in (cuts for num in range(len(gradients)) for cuts in combinations(inner, num)):
        buckets = []
        for begin, end in pairwise([0, *cuts, len(gradients)]):
            for dtype in {gradient.dtype for gradient in gradients[begin:end]}:
                buckets.append([index for index in range(begin, end) if gradients[index].dtype == dtype])
        yield sorted(buckets, key=lambda bucket: bucket[-1])


def every_end(step: TimedStep, price: Price) -> Iterator[tuple[float, int]]:
    """Yield the end and the number of buckets of every cut with every choice of plans."""
    for buckets in every_cut(step.gradients):
        sizes = [sum(step.gradients[index].num_bytes for index in bucket) for bucket in buckets]
        options = [price(size, step.gradients[bucket[0]].dtype) for size, bucket in zip(sizes, buckets, strict=True)]
        ready_s = [step.ready_s[bucket[-1]] for bucket in buckets]
        for costs in product(*options):
            yield end_s(ready_s, costs), len(buckets)


@settings(max_examples=200)
@given(
    step=st.one_of(steps(DTYPES[:1], 6), steps(DTYPES[:2], 5)),
    price=prices,
    tolerance=st.sampled_from([0.0, 0.1]),
)
# Rare cases: a later state with fewer buckets is needed, or a plan that crosses beats a cheaper one that does not.
@example(step_of([4, 2, 2, 7, 8], [3, 10, 21, 27, 28]), any_price(86228, 1), 0.1)
@example(step_of([1, 7, 4, 6], [3, 7, 26, 27]), any_price(143240, 3), 0.0)
@example(step_of([5, 2, 7], [2, 4, 15]), any_price(20779, 2), 0.0)
def test_merge_equals_an_exhaustive_search(step: TimedStep, price: Price, tolerance: float) -> None:
    merged = merge(*step, price, grain=0.0, width=None, tolerance=tolerance)
    ends = list(every_end(step, price))
    latest_s = min(end for end, _ in ends) * (1 + max(tolerance, 1e-9))
    fewest = min(num for end, num in ends if end <= latest_s)
    assert (end_of(merged), len(merged)) == min((end, num) for end, num in ends if num == fewest)


@settings(max_examples=10)
@given(step=steps(DTYPES[:1], 7), seed=st.integers(0, 2**31))
def test_merge_equals_an_exhaustive_search_of_two_plans_and_seven_gradients(step: TimedStep, seed: int) -> None:
    price = any_price(seed, 2)
    assert end_of(merge(*step, price, **EXACT)) == min(every_end(step, price))[0]


@given(step=steps(DTYPES, 30, most_bytes=40), price=prices)
def test_merged_buckets_hold_each_gradient_once_in_order(step: TimedStep, price: Price) -> None:
    merged = merge(*step, price)
    assert sorted(index for bucket in merged for index in bucket.gradients) == list(range(len(step.gradients)))
    assert [bucket.gradients[-1] for bucket in merged] == sorted(bucket.gradients[-1] for bucket in merged)
    for bucket in merged:
        (dtype,) = {step.gradients[index].dtype for index in bucket.gradients}
        size = sum(step.gradients[index].num_bytes for index in bucket.gradients)
        assert bucket.costs == price(size, dtype)[bucket.option]
        assert bucket.ready_s == step.ready_s[bucket.gradients[-1]]
    for dtype in DTYPES:
        in_order = [index for index, gradient in enumerate(step.gradients) if gradient.dtype == dtype]
        of_dtype = [bucket for bucket in merged if step.gradients[bucket.gradients[0]].dtype == dtype]
        assert [index for bucket in of_dtype for index in bucket.gradients] == in_order


@given(
    step=steps(DTYPES[:1], 12, most_bytes=40 * MIB),
    options=st.lists(
        st.tuples(st.floats(0, 20), st.floats(0, 1e-6), st.sampled_from([0.0, 1e-8, 1e-6])), min_size=1, max_size=3
    ),
)
def test_merge_never_ends_later_than_simple_rules(step: TimedStep, options: list[tuple[float, float, float]]) -> None:
    price = linear_price(*options)
    found_s = end_of(merge(*step, price, **EXACT))
    each = [[index] for index in range(len(step.gradients))]
    for buckets in ([list(range(len(each)))], each, fuse(step.gradients, 25 * MIB)):
        for option in range(len(options)):
            costs = [
                price(sum(step.gradients[index].num_bytes for index in bucket), "fp32")[option] for bucket in buckets
            ]
            assert found_s <= end_s([step.ready_s[bucket[-1]] for bucket in buckets], costs) * (1 + 1e-9)


@given(step=steps(DTYPES[:1], 10))
def test_without_latency_merging_costs_nothing(step: TimedStep) -> None:
    price = linear_price((0.0, 2.0, 0.0))
    alone = [price(gradient.num_bytes, "fp32")[0] for gradient in step.gradients]
    assert end_of(merge(*step, price, **EXACT)) == end_s(step.ready_s, alone)


def test_gradients_hidden_by_backward_are_merged_and_the_last_is_not() -> None:
    step = step_of([10] * 8, [100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0])
    merged = merge(*step, linear_price((1.0, 0.1, 0.0)), **EXACT)
    assert [bucket.gradients for bucket in merged] == [[0, 1, 2, 3, 4, 5, 6], [7]]


@given(step=steps(DTYPES[:1], 12))
def test_a_huge_latency_makes_one_bucket(step: TimedStep) -> None:
    assert len(merge(*step, linear_price((1e6, 1.0, 1.0), (2e6, 0.5, 0.5)))) == 1


def test_buckets_may_have_different_plans() -> None:
    step = step_of([1, 1000], [0.0, 1000.0])
    merged = merge(*step, linear_price((100.0, 1.0, 0.0), (1.0, 3.0, 0.0)), **EXACT)
    assert [bucket.option for bucket in merged] == [1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_default_grain_and_width_are_nearly_exact(seed: int) -> None:
    generator = random.Random(seed)
    gradients = [Gradient(int(10 ** generator.uniform(2, 7)), "fp32") for _ in range(40)]
    ready_s = sorted(generator.uniform(0.0, 1.0) for _ in gradients)
    price = linear_price((1e-2, 1e-8, 0.0), (2e-2, 5e-9, 1e-9), (1e-3, 3e-8, 1e-9))
    found_s, least_s = (end_of(merge(gradients, ready_s, price, **options)) for options in ({}, EXACT))
    assert found_s < 1.005 * least_s


@given(step=steps(DTYPES[:2], 60, most_bytes=1000), grain=st.floats(0.01, 1))
def test_pieces_are_maximal_within_the_grain(step: TimedStep, grain: float) -> None:
    gradients, ready_s = step
    sizes = [gradient.num_bytes for gradient in gradients]

    def is_fine(begin: int, end: int) -> bool:
        nearer_bytes = min(sum(sizes[:end]), sum(sizes[begin:]))
        nearer_s = min(ready_s[end - 1] - ready_s[0], ready_s[-1] - ready_s[begin])
        is_short = ready_s[end - 1] - ready_s[begin] <= grain * nearer_s
        return is_short and sum(sizes[begin:end]) <= grain * nearer_bytes

    cuts = find_cuts(gradients, ready_s, grain)
    assert cuts[0] == 0 and cuts[-1] == len(gradients) and cuts == sorted(set(cuts))
    assert all(end - begin == 1 or is_fine(begin, end) for begin, end in pairwise(cuts))
    assert not any(is_fine(begin, end + 1) for begin, end in pairwise(cuts[:-1]))


def test_zero_grain_allows_every_cut() -> None:
    assert find_cuts([Gradient(4, "fp32")] * 5, [0.0] * 5, 0.0) == [0, 1, 2, 3, 4, 5]


def test_merge_of_no_gradients_is_empty() -> None:
    assert merge([], [], any_price(0, 2)) == []
