"""The engine's own all-reduces: prices and errors."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.algorithms import ring
from megabatch.planning.cost import Link, seconds
from megabatch.planning.plan import CommDtype, Phase, Plan, error_bound
from megabatch.planning.stock import Engine, engine_plans, engine_seconds, price_engine
from megabatch.planning.topology import ClusterShape

ENGINE = Engine(
    base_s=8.4e-6,
    hop_in_node_s=3.4e-6,
    hop_between_s=14e-6,
    hop_switch_s=30e-6,
    node_bytes_per_s=180e9,
    network_bytes_per_s=25e9,
)
MIB = 2**20
shapes = st.builds(ClusterShape.regular, st.integers(2, 64), st.integers(1, 16))


def test_a_ring_costs_what_the_same_ring_costs_as_a_flat_plan() -> None:
    """Where all hops are alike, and nothing but them is counted."""
    alike = Engine(base_s=0, hop_in_node_s=1e-5, hop_between_s=1e-5, node_bytes_per_s=1e9, network_bytes_per_s=1e9)
    shape, num_elements = ClusterShape.regular(4, 4), 16 * 16 * 1000
    flat = Plan("", (Phase("all_reduce", "all", "fp32"),))
    link = Link(1e-5, 1e-9, 0.0)
    expected = seconds(flat, shape, num_elements, {"all": link})
    assert engine_seconds("ring", shape, alike, 4 * num_elements) == pytest.approx(expected)


@given(shapes, st.integers(0, 28))
def test_a_tree_has_fewer_hops_and_a_ring_fewer_bytes(shape: ClusterShape, exponent: int) -> None:
    small, large = (engine_seconds(kind, shape, ENGINE, 1) for kind in ("tree", "ring"))
    assert small <= large + 1 / ENGINE.network_bytes_per_s
    size = 2**exponent
    extra_bytes_s = (2 * size - 2 * (shape.num_ranks - 1) / shape.num_ranks * size) / ENGINE.network_bytes_per_s
    tree, ring = (engine_seconds(kind, shape, ENGINE, size) for kind in ("tree", "ring"))
    assert tree <= ring + extra_bytes_s + 1e-12


def test_sums_in_the_network_cost_the_same_on_any_number_of_nodes() -> None:
    times_s = {engine_seconds("in_network", ClusterShape.regular(n, 8), ENGINE, 51 * MIB) for n in (2, 64, 2048)}
    assert len(times_s) == 1


@given(shapes, st.sampled_from(["ring", "tree", "in_network"]))
def test_more_bytes_never_cost_less(shape: ClusterShape, kind: str) -> None:
    times_s = [engine_seconds(kind, shape, ENGINE, size) for size in (1, 1024, MIB, 100 * MIB)]  # type: ignore[arg-type]
    assert all(first <= second for first, second in pairwise(times_s))


def test_latencies_are_those_of_nccls_model() -> None:
    """By hand, for 8 nodes of 8 with NVLink (3.4 us) and InfiniBand (14 us), base 8.4 us, a byte."""
    shape = ClusterShape.regular(8, 8)
    expected_us = {
        "ring": 8.4 + (2 * 63 - 2 * 7) * 3.4 + 2 * 7 * 14,
        "tree": 8.4 + 2 * (7 * 3.4 + 3 * 14),
        "in_network": 8.4 + 2 * 7 * 3.4 + 30,
    }
    found_us = {kind: 1e6 * engine_seconds(kind, shape, ENGINE, 0) for kind in expected_us}  # type: ignore[arg-type]
    assert found_us == pytest.approx(expected_us)
    assert {kind: round(us) for kind, us in found_us.items()} == {"ring": 585, "tree": 140, "in_network": 86}


def test_one_rank_needs_no_plan_and_one_node_only_a_ring() -> None:
    assert engine_plans(ClusterShape.regular(1, 1), "fp16", ("ring", "tree")) == []
    in_node = engine_plans(ClusterShape.regular(1, 8), "fp16", ("ring", "tree", "in_network"))
    assert [plan.name for plan in in_node] == ["ring/fp16"]
    assert not price_engine(in_node[0], ClusterShape.regular(1, 8), ENGINE, 1000, 4).crosses


@given(shapes, st.sampled_from(["fp32", "bf16", "fp16"]))
def test_the_ring_that_is_priced_is_the_one_that_runs(shape: ClusterShape, dtype: CommDtype) -> None:
    assert engine_plans(shape, dtype, ("ring",)) == [ring(shape, dtype)]


def test_sixteen_bits_halve_the_bytes() -> None:
    shape = ClusterShape.regular(2, 8)
    free = Engine(base_s=0, hop_in_node_s=0, hop_between_s=0, node_bytes_per_s=1e9, network_bytes_per_s=1e9)
    exact, rounded = (engine_plans(shape, dtype, ("ring",))[0] for dtype in ("fp32", "fp16"))
    assert (
        price_engine(exact, shape, free, 1000, 4).crossing_s
        == 2 * price_engine(rounded, shape, free, 1000, 4).crossing_s
    )


def test_the_engines_sum_of_sixteen_bits_may_err_by_every_hop() -> None:
    """Against a ring that adds one by one in bf16, the worst order of its roundings."""
    ours = Plan("", (Phase("all_reduce", "all", "bf16"),))
    engines = engine_plans(ClusterShape.regular(256, 8), "bf16", ("ring",))[0]
    roundoff = 2.0**-8
    assert error_bound(ours, 2048, 1.0) == pytest.approx(2 * roundoff, rel=0.05)
    assert error_bound(engines, 2048, 1.0) >= math.expm1(2047 * math.log1p(roundoff))
