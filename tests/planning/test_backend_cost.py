"""Prices and error bounds of the backend's all-reduce."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.algorithms import ring
from megabatch.planning.backend_cost import BackendCosts, backend_plans, backend_seconds, price_backend
from megabatch.planning.cost import Link, seconds
from megabatch.planning.plan import BackendAlgorithm, CommDtype, Phase, Plan, error_bound
from megabatch.planning.topology import ClusterShape

COSTS = BackendCosts(
    base_s=8.4e-6,
    hop_in_node_s=3.4e-6,
    hop_between_s=14e-6,
    hop_switch_s=30e-6,
    node_bytes_per_s=180e9,
    network_bytes_per_s=25e9,
)
MIB = 2**20
shapes = st.builds(ClusterShape.regular, st.integers(2, 64), st.integers(1, 16))


def test_backend_ring_costs_as_much_as_flat_over_equal_hops() -> None:
    alike = BackendCosts(
        base_s=0, hop_in_node_s=1e-5, hop_between_s=1e-5, node_bytes_per_s=1e9, network_bytes_per_s=1e9
    )
    shape, num_elements = ClusterShape.regular(4, 4), 16 * 16 * 1000
    flat = Plan("", (Phase("all_reduce", "all", "same"),))
    link = Link(1e-5, 1e-9, 0.0)
    expected = seconds(flat, shape, num_elements, {"all": link})
    assert backend_seconds("ring", shape, alike, 4 * num_elements) == pytest.approx(expected)


@given(shapes, st.integers(0, 28))
def test_a_tree_has_fewer_hops_and_a_ring_fewer_bytes(shape: ClusterShape, exponent: int) -> None:
    small, large = (backend_seconds(kind, shape, COSTS, 1) for kind in ("tree", "ring"))
    assert small <= large + 1 / COSTS.network_bytes_per_s
    size = 2**exponent
    extra_bytes_s = (2 * size - 2 * (shape.num_ranks - 1) / shape.num_ranks * size) / COSTS.network_bytes_per_s
    tree, ring = (backend_seconds(kind, shape, COSTS, size) for kind in ("tree", "ring"))
    assert tree <= ring + extra_bytes_s + 1e-12


def test_in_network_reduction_costs_the_same_on_any_number_of_nodes() -> None:
    times_s = {backend_seconds("in_network", ClusterShape.regular(n, 8), COSTS, 51 * MIB) for n in (2, 64, 2048)}
    assert len(times_s) == 1


@given(shapes, st.sampled_from(["ring", "tree", "in_network"]))
def test_more_bytes_never_cost_less(shape: ClusterShape, kind: BackendAlgorithm) -> None:
    times_s = [backend_seconds(kind, shape, COSTS, size) for size in (1, 1024, MIB, 100 * MIB)]
    assert all(first <= second for first, second in pairwise(times_s))


def test_latencies_equal_nccls_model() -> None:
    """Computed by hand for 8 nodes of 8, NVLink (3.4 us), InfiniBand (14 us), base 8.4 us."""
    shape = ClusterShape.regular(8, 8)
    expected_us: dict[BackendAlgorithm, float] = {
        "ring": 8.4 + (2 * 63 - 2 * 7) * 3.4 + 2 * 7 * 14,
        "tree": 8.4 + 2 * (7 * 3.4 + 3 * 14),
        "in_network": 8.4 + 2 * 7 * 3.4 + 30,
    }
    found_us = {kind: 1e6 * backend_seconds(kind, shape, COSTS, 0) for kind in expected_us}
    assert found_us == pytest.approx(expected_us)
    assert {kind: round(us) for kind, us in found_us.items()} == {"ring": 585, "tree": 140, "in_network": 86}


def test_one_rank_needs_no_plan_and_one_node_only_a_ring() -> None:
    assert backend_plans(ClusterShape.regular(1, 1), "fp16", ("ring", "tree")) == []
    in_node = backend_plans(ClusterShape.regular(1, 8), "fp16", ("ring", "tree", "in_network"))
    assert [plan.name for plan in in_node] == ["ring/fp16"]
    assert not price_backend(in_node[0], ClusterShape.regular(1, 8), COSTS, 1000, 4).crosses


@given(shapes, st.sampled_from(["same", "bf16", "fp16"]))
def test_the_priced_ring_is_the_plan_that_runs(shape: ClusterShape, dtype: CommDtype) -> None:
    assert backend_plans(shape, dtype, ("ring",)) == [ring(shape, dtype)]


def test_sixteen_bits_halve_the_bytes() -> None:
    shape = ClusterShape.regular(2, 8)
    free = BackendCosts(base_s=0, hop_in_node_s=0, hop_between_s=0, node_bytes_per_s=1e9, network_bytes_per_s=1e9)
    exact, rounded = (backend_plans(shape, dtype, ("ring",))[0] for dtype in ("same", "fp16"))
    assert (
        price_backend(exact, shape, free, 1000, 4).crossing_s
        == 2 * price_backend(rounded, shape, free, 1000, 4).crossing_s
    )


def test_the_backends_16_bit_error_grows_with_every_hop() -> None:
    """Compare with a ring that adds one by one in bf16 and rounds in the worst direction."""
    ours = Plan("", (Phase("all_reduce", "all", "bf16"),))
    backends = backend_plans(ClusterShape.regular(256, 8), "bf16", ("ring",))[0]
    roundoff = 2.0**-8
    assert error_bound(ours, 2048, 1.0) == pytest.approx(2 * roundoff, rel=0.05)
    assert error_bound(backends, 2048, 1.0) >= math.expm1(2047 * math.log1p(roundoff))
