import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS, flat, hierarchical, torus
from megabatch.planning.cost import (
    Link,
    Timing,
    bytes_crossing,
    fit_link,
    group_seconds,
    phase_seconds,
    seconds,
    steps,
)
from megabatch.planning.plan import BLOCK, COMM_DTYPES, CommDtype, Phase, Plan
from megabatch.planning.topology import Axis, ClusterShape, Topology, from_hosts, regular
from tests.support import enumerated
from tests.support.oracle import Oracle, element_counts, every_plan, plans, topologies

counts = st.integers(1, 40)
times = st.floats(1e-6, 1.0)
LINKS: dict[Axis, Link] = {
    "all": Link(5e-5, 8e-9, 3e-11),
    "node": Link(1e-6, 1e-10, 5e-11),
    "leaders": Link(4e-5, 9e-9, 2e-11),
    "inter_node": Link(3e-5, 7e-9, 4e-11),
}


def some(plan: Plan | None) -> Plan:
    assert plan
    return plan


@settings(max_examples=60)
@given(topology=topologies(), num_elements=element_counts(), element_bytes=st.sampled_from([2, 4, 8]))
def test_costs_by_shape_equal_an_enumeration_of_ranks(
    topology: Topology, num_elements: int, element_bytes: int
) -> None:
    shape = topology.shape
    for plan in every_plan(topology):
        assert steps(plan, shape) == enumerated.steps(plan, topology), plan
        found_s = phase_seconds(plan, shape, num_elements, LINKS, element_bytes)
        assert found_s == enumerated.phase_seconds(plan, topology, num_elements, LINKS, element_bytes), plan


@settings(max_examples=60)
@given(topology=topologies(), num_elements=element_counts(), element_bytes=st.sampled_from([2, 4, 8]))
def test_bytes_equal_an_enumeration_of_pairs_of_ranks(
    topology: Topology, num_elements: int, element_bytes: int
) -> None:
    for plan in every_plan(topology):
        crossing = bytes_crossing(plan, topology, num_elements, element_bytes)
        assert crossing == enumerated.bytes_crossing(plan, topology, num_elements, element_bytes), plan


@pytest.mark.parametrize("other", ["all", "leaders", "node"])
def test_groups_whose_members_hold_different_elements_have_no_price(other: Axis) -> None:
    plan = Plan("wrong", (Phase("reduce_scatter", "node", "same"), Phase("all_reduce", other, "same")))
    for topology in (regular(2, 2), from_hosts("aab")):
        with pytest.raises(AssertionError, match="hold different elements"):
            phase_seconds(plan, topology.shape, 100, LINKS)
        with pytest.raises(AssertionError, match="hold different elements"):
            bytes_crossing(plan, topology, 100)


@settings(max_examples=50)
@given(topology=topologies(), num_elements=element_counts(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_bytes_that_the_reference_counts_equal_those_of_the_oracle(
    topology: Topology, num_elements: int, dtype: torch.dtype
) -> None:
    inputs = [torch.zeros(num_elements, dtype=dtype)] * topology.num_ranks
    for _, plan in plans(topology):
        travelled = Oracle(plan, topology, inputs).bytes_between
        for rank in range(topology.num_ranks):
            from_rank = sum(count for (sender, _), count in travelled.items() if sender == rank)
            assert enumerated.bytes_sent(plan, topology, num_elements, rank, dtype.itemsize) == from_rank, (plan, rank)


@settings(max_examples=50)
@given(topology=topologies(), num_elements=element_counts(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_bytes_crossing_equal_those_of_the_oracle(topology: Topology, num_elements: int, dtype: torch.dtype) -> None:
    inputs = [torch.zeros(num_elements, dtype=dtype)] * topology.num_ranks
    for _, plan in plans(topology):
        if plan.name.startswith("flat"):  # along rings, see below
            continue
        travelled = Oracle(plan, topology, inputs).bytes_between
        crossing = [
            sum(count for (sender, other), count in travelled.items() if sender in node and other not in node)
            for node in topology.nodes
        ]
        assert bytes_crossing(plan, topology, num_elements, dtype.itemsize) == crossing, plan


@given(topology=topologies(), num_elements=element_counts())
def test_the_backends_ring_crosses_if_the_next_rank_is_in_another_node(topology: Topology, num_elements: int) -> None:
    """Each member sends 2S(p-1)/p to its successor; unequal slices make a difference of two blocks at most."""
    p = topology.num_ranks
    crossing = bytes_crossing(some(flat(topology.shape, "same")), topology, num_elements)
    for node, num_bytes in zip(topology.nodes, crossing, strict=True):
        edges = sum((rank + 1) % p not in node for rank in node)
        assert num_bytes == pytest.approx(edges * 2 * 4 * num_elements * (p - 1) / p, abs=edges * 2 * 4 * BLOCK)


def test_two_nodes_of_two_ranks_send_half_as_much_again_through_a_ring() -> None:
    topology, size = regular(2, 2), 4 * 6400
    shape = topology.shape
    assert bytes_crossing(some(torus(shape, "same")), topology, 6400) == [size, size]
    assert bytes_crossing(some(hierarchical(shape, "same")), topology, 6400) == [size, size]
    assert bytes_crossing(some(flat(shape, "same")), topology, 6400) == [size * 3 // 2] * 2
    assert bytes_crossing(some(flat(shape, "same")), from_hosts("abab"), 6400) == [size * 3] * 2
    assert bytes_crossing(some(torus(shape, "bf16")), topology, 6400) == [size // 2] * 2
    # Directly to two others, half of their slices; then three of four slices along the ring.
    assert bytes_crossing(some(flat(shape, "bf16")), topology, 6400) == [size // 2 + size * 3 // 8] * 2


@given(nodes=counts, ranks=counts)
def test_steps_equal_the_published_formulas(nodes: int, ranks: int) -> None:
    """The formulas are those quoted in algorithms.py."""
    shape, p, k = ClusterShape.regular(nodes, ranks), nodes * ranks, ranks
    for dtype in COMM_DTYPES:
        assert steps(some(flat(shape, dtype)), shape) == 2 * (p - 1)
        assert steps(some(hierarchical(shape, dtype)), shape) == 4 * (k - 1) + 2 * (p // k - 1)
        assert steps(some(torus(shape, dtype)), shape) == 2 * (k - 1) + 2 * (p // k - 1)


def test_1024_ranks_in_groups_of_16_take_186_steps_instead_of_2046() -> None:
    shape = ClusterShape.regular(64, 16)
    assert steps(some(flat(shape, "same")), shape) == 2046
    assert steps(some(hierarchical(shape, "same")), shape) == 186


@settings(max_examples=30)
@given(nodes=counts, ranks=counts, blocks=st.integers(1, 100))
@example(nodes=256, ranks=8, blocks=1)
@example(nodes=10**9, ranks=8, blocks=1)  # visiting every rank or group would never end
def test_seconds_equal_the_published_formulas_if_slices_are_equal(nodes: int, ranks: int, blocks: int) -> None:
    shape, p = ClusterShape.regular(nodes, ranks), nodes * ranks
    num_elements = 16 * p * nodes * blocks
    size = 4 * num_elements

    def ring(link: Link, members: int, size: float, narrower: float = 1.0) -> float:
        share = (members - 1) / members * size
        sent_s = 2 * share * narrower * link.beta_s_per_byte
        return 2 * (members - 1) * link.alpha_s + sent_s + share * link.gamma_s_per_byte

    def ends_of_a_node(share: float) -> float:
        # Hierarchical moves the data twice each way (share 2), torus once.  Both add once.
        link, part = LINKS["node"], (ranks - 1) / ranks * size
        return 2 * share * ((ranks - 1) * link.alpha_s + part * link.beta_s_per_byte) + part * link.gamma_s_per_byte

    widths: dict[CommDtype, float] = {"same": 1.0, "bf16": 0.5}
    for dtype, width in widths.items():
        expected = {
            "flat": ring(LINKS["all"], p, size, width),
            "hierarchical": ends_of_a_node(2) + ring(LINKS["leaders"], nodes, size, width),
            "torus": ends_of_a_node(1) + ring(LINKS["inter_node"], nodes, size / ranks, width),
        }
        for name, algorithm in ALGORITHMS.items():
            found = seconds(some(algorithm(shape, dtype)), shape, num_elements, LINKS)
            assert found == pytest.approx(expected[name], rel=1e-9), name


@given(topology=topologies(), num_elements=element_counts())
def test_seconds_are_the_sum_of_phases(topology: Topology, num_elements: int) -> None:
    for _, plan in plans(topology):
        phases = phase_seconds(plan, topology.shape, num_elements, LINKS)
        assert len(phases) == len(plan.phases) and all(phase_s > 0 for phase_s in phases)
        assert seconds(plan, topology.shape, num_elements, LINKS) == sum(phases)


@given(topology=topologies(), num_elements=element_counts())
def test_no_rank_sends_faster_than_its_links(topology: Topology, num_elements: int) -> None:
    per_byte: dict[Axis, Link] = dict.fromkeys(LINKS, Link(0.0, 1.0, 0.0))
    for _, plan in plans(topology):
        slowest_s = seconds(plan, topology.shape, num_elements, per_byte)
        sent = [enumerated.bytes_sent(plan, topology, num_elements, rank) for rank in range(topology.num_ranks)]
        assert max(sent) <= slowest_s


@given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), num_elements=element_counts())
def test_the_largest_node_decides_the_time_in_the_node(hosts: list[str], num_elements: int) -> None:
    unequal = from_hosts(hosts).shape
    equal = ClusterShape.regular(unequal.num_nodes, unequal.largest_node)
    ours, theirs = (
        seconds(some(hierarchical(shape, "bf16")), shape, num_elements, LINKS) for shape in (unequal, equal)
    )
    assert ours == theirs


@given(
    alpha_s=st.floats(1e-7, 1e-2),
    beta_s=st.floats(1e-12, 1e-6),
    gamma_s=st.floats(0.0, 1e-6),
    num_members=st.integers(2, 9),
    blocks=st.integers(100, 5000),
    dtype=st.sampled_from(["same", "bf16"]),
    num_halves=st.sampled_from([1, 2]),
)
def test_a_fitted_link_costs_what_was_measured(
    alpha_s: float, beta_s: float, gamma_s: float, num_members: int, blocks: int, dtype: CommDtype, num_halves: int
) -> None:
    link, num_elements = Link(alpha_s, beta_s, gamma_s), 16 * blocks * num_members
    summed = Phase("all_reduce" if num_halves == 2 else "reduce_scatter", "inter_node", dtype)
    timing = Timing(
        small_s=num_halves * (num_members - 1) * alpha_s,
        gather_s=group_seconds(Phase("all_gather", "inter_node", dtype), num_members, num_elements, link, 4),
        sum_s=group_seconds(summed, num_members, num_elements, link, 4),
        num_halves=num_halves,
    )
    fitted = fit_link(timing, num_members, num_elements, comm_bytes=4 if dtype == "same" else 2)
    again_s = group_seconds(summed, num_members, num_elements, fitted, 4)
    assert again_s == pytest.approx(timing.sum_s, rel=1e-6)
    assert fitted.beta_s_per_byte == pytest.approx(beta_s, rel=1e-4, abs=1e-15)


@given(small_s=times, gather_s=times, sum_s=times, num_members=st.integers(2, 9))
def test_noise_never_makes_a_link_negative(small_s: float, gather_s: float, sum_s: float, num_members: int) -> None:
    link = fit_link(Timing(small_s, gather_s, sum_s, 2), num_members, 1 << 20, comm_bytes=4)
    assert link.alpha_s > 0 and link.beta_s_per_byte >= 0 and link.gamma_s_per_byte >= 0
    phase = Phase("all_reduce", "inter_node", "same")
    assert group_seconds(phase, num_members, 1 << 20, link, 4) >= min(sum_s, small_s) * (1 - 1e-9)


def test_in_memory_a_reduce_is_a_reduce_scatter_and_a_broadcast_an_all_gather() -> None:
    in_memory = Link(1e-6, 1e-10, 5e-11, in_memory=True)
    for whole, half in (("reduce", "reduce_scatter"), ("broadcast", "all_gather")):
        taken_s = [group_seconds(Phase(op, "node", "same"), 4, 1 << 20, in_memory, 4) for op in (whole, half)]  # type: ignore[arg-type]
        assert taken_s[0] == taken_s[1] > 0
