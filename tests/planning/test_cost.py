import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS, flat, hierarchical, torus
from megabatch.planning.cost import Link, bytes_crossing, bytes_sent, phase_seconds, seconds, steps
from megabatch.planning.plan import BLOCK, WIRES, Plan
from megabatch.planning.topology import Axis, Topology, from_hosts, regular
from tests.support.oracle import Oracle, element_counts, plans, topologies

counts = st.integers(1, 40)
LINKS: dict[Axis, Link] = {
    "all": Link(5e-5, 8e-9, 3e-11),
    "node": Link(1e-6, 1e-10, 5e-11),
    "masters": Link(4e-5, 9e-9, 2e-11),
    "across": Link(3e-5, 7e-9, 4e-11),
}


def some(plan: Plan | None) -> Plan:
    assert plan
    return plan


@settings(max_examples=50)
@given(topology=topologies(), num_elements=element_counts(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_bytes_sent_are_those_that_travel(topology: Topology, num_elements: int, dtype: torch.dtype) -> None:
    inputs = [torch.zeros(num_elements, dtype=dtype)] * topology.num_ranks
    for _, plan in plans(topology):
        travelled = Oracle(plan, topology, inputs).bytes_between
        for rank in range(topology.num_ranks):
            from_rank = sum(count for (sender, _), count in travelled.items() if sender == rank)
            assert bytes_sent(plan, topology, num_elements, rank, dtype.itemsize) == from_rank, (plan, rank)


@settings(max_examples=50)
@given(topology=topologies(), num_elements=element_counts(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_bytes_crossing_are_those_that_travel_between_nodes(
    topology: Topology, num_elements: int, dtype: torch.dtype
) -> None:
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
def test_the_engines_ring_crosses_where_the_next_rank_is_in_another_node(topology: Topology, num_elements: int) -> None:
    """Each member sends 2S(p-1)/p to its successor; unequal slices make a difference of two blocks at most."""
    p = topology.num_ranks
    crossing = bytes_crossing(some(flat(topology, "fp32")), topology, num_elements)
    for node, num_bytes in zip(topology.nodes, crossing, strict=True):
        edges = sum((rank + 1) % p not in node for rank in node)
        assert num_bytes == pytest.approx(edges * 2 * 4 * num_elements * (p - 1) / p, abs=edges * 2 * 4 * BLOCK)


def test_two_hosts_of_two_ranks_send_half_as_much_again_through_a_ring() -> None:
    topology, size = regular(2, 2), 4 * 6400
    assert bytes_crossing(some(torus(topology, "fp32")), topology, 6400) == [size, size]
    assert bytes_crossing(some(hierarchical(topology, "fp32")), topology, 6400) == [size, size]
    assert bytes_crossing(some(flat(topology, "fp32")), topology, 6400) == [size * 3 // 2] * 2
    assert bytes_crossing(some(flat(from_hosts("abab"), "fp32")), from_hosts("abab"), 6400) == [size * 3] * 2
    assert bytes_crossing(some(torus(topology, "bf16")), topology, 6400) == [size // 2] * 2
    # Directly to two others, half of their slices; then three of four slices along the ring.
    assert bytes_crossing(some(flat(topology, "bf16")), topology, 6400) == [size // 2 + size * 3 // 8] * 2


@given(nodes=counts, ranks=counts)
def test_flat_takes_2p_minus_2_steps_and_hierarchical_4k_minus_4_and_2_per_other_node(nodes: int, ranks: int) -> None:
    topology, p, k = regular(nodes, ranks), nodes * ranks, ranks
    for wire in WIRES:
        assert steps(some(flat(topology, wire)), topology) == 2 * (p - 1)
        assert steps(some(hierarchical(topology, wire)), topology) == 4 * (k - 1) + 2 * (p // k - 1)
        assert steps(some(torus(topology, wire)), topology) == 2 * (k - 1) + 2 * (p // k - 1)


def test_1024_ranks_in_groups_of_16_take_186_steps_instead_of_2046() -> None:
    topology = regular(64, 16)
    assert steps(some(flat(topology, "fp32")), topology) == 2046
    assert steps(some(hierarchical(topology, "fp32")), topology) == 186


@settings(max_examples=30)
@given(nodes=counts, ranks=counts, blocks=st.integers(1, 100))
def test_seconds_are_the_known_formulas_when_slices_are_equal(nodes: int, ranks: int, blocks: int) -> None:
    topology, p = regular(nodes, ranks), nodes * ranks
    num_elements = 16 * p * nodes * blocks
    size = 4 * num_elements

    def ring(link: Link, members: int, size: float, wire: float = 1.0) -> float:
        share = (members - 1) / members * size
        return (
            2 * (members - 1) * link.alpha_s + 2 * share * wire * link.beta_s_per_byte + share * link.gamma_s_per_byte
        )

    def ends_of_a_node(share: float) -> float:
        # Twice there, twice back for hierarchical (share 2); once each way for torus.  One sum.
        link, part = LINKS["node"], (ranks - 1) / ranks * size
        return 2 * share * ((ranks - 1) * link.alpha_s + part * link.beta_s_per_byte) + part * link.gamma_s_per_byte

    for wire, width in (("fp32", 1.0), ("bf16", 0.5)):
        expected = {
            "flat": ring(LINKS["all"], p, size, width),
            "hierarchical": ends_of_a_node(2) + ring(LINKS["masters"], nodes, size, width),
            "torus": ends_of_a_node(1) + ring(LINKS["across"], nodes, size / ranks, width),
        }
        for name, algorithm in ALGORITHMS.items():
            found = seconds(some(algorithm(topology, wire)), topology, num_elements, LINKS)
            assert found == pytest.approx(expected[name], rel=1e-9), name


@given(topology=topologies(), num_elements=element_counts())
def test_seconds_are_those_of_the_phases_one_after_another(topology: Topology, num_elements: int) -> None:
    for _, plan in plans(topology):
        phases = phase_seconds(plan, topology, num_elements, LINKS)
        assert len(phases) == len(plan.phases) and all(phase_s > 0 for phase_s in phases)
        assert seconds(plan, topology, num_elements, LINKS) == sum(phases)


@given(topology=topologies(), num_elements=element_counts())
def test_no_rank_sends_faster_than_its_links(topology: Topology, num_elements: int) -> None:
    per_byte: dict[Axis, Link] = dict.fromkeys(LINKS, Link(0.0, 1.0, 0.0))
    for _, plan in plans(topology):
        slowest_s = seconds(plan, topology, num_elements, per_byte)
        sent = [bytes_sent(plan, topology, num_elements, rank) for rank in range(topology.num_ranks)]
        assert max(sent) <= slowest_s


@given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), num_elements=element_counts())
def test_the_largest_node_decides_the_time_in_the_node(hosts: list[str], num_elements: int) -> None:
    unequal = from_hosts(hosts)
    equal = regular(unequal.num_nodes, unequal.largest_node)
    ours, theirs = (
        seconds(some(hierarchical(topology, "bf16")), topology, num_elements, LINKS) for topology in (unequal, equal)
    )
    assert ours == theirs
