from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.topology import Axis, ClusterShape, Topology, from_hosts, regular, runs_of
from tests.support.oracle import regular_but_shuffled, topologies

AXES: tuple[Axis, ...] = ("all", "node", "leaders", "inter_node")


@given(topology=topologies())
def test_groups_are_ascending_and_disjoint(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert all(list(group) == sorted(group) and group for group in groups)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        if axis in ("all", "node"):
            assert sorted(ranks) == list(range(topology.num_ranks))


@given(topology=topologies())
def test_members_are_the_group_of_the_rank(topology: Topology) -> None:
    for axis in AXES:
        for rank in range(topology.num_ranks):
            holding = [group for group in topology.groups(axis) if rank in group]
            assert topology.members(axis, rank) == (holding[0] if holding else ())


@given(topology=topologies())
def test_leaders_are_the_first_rank_of_every_node(topology: Topology) -> None:
    (leaders,) = topology.groups("leaders")
    assert [topology.members("node", leader)[0] for leader in leaders] == list(leaders)
    assert len(leaders) == topology.num_nodes


@given(topology=regular_but_shuffled())
def test_inter_node_groups_have_the_same_local_index(topology: Topology) -> None:
    def place(rank: int) -> int:
        return topology.members("node", rank).index(rank)

    for rank in range(topology.num_ranks):
        others = topology.members("inter_node", rank)
        assert {place(other) for other in others} == {place(rank)}
        assert len(others) == topology.num_nodes


def test_ranks_assigned_round_robin_form_nodes() -> None:
    topology = from_hosts(["a", "b", "b", "a"])
    assert topology.nodes == ((0, 3), (1, 2))
    assert topology.groups("inter_node") == [(0, 1), (2, 3)]
    assert from_hosts(["a", "a", "b", "b"]) == regular(2, 2)


def test_unequal_nodes_have_no_inter_node_groups() -> None:
    topology = from_hosts("aab")
    assert not topology.is_regular and topology.largest_node == 2
    assert topology.groups("inter_node") == [] and topology.members("inter_node", 0) == ()


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), ()), ((0, 0),), ((1, 2),), ((1, 0),), ((1,), (0,))])
def test_missing_duplicate_or_unordered_ranks_are_rejected(nodes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="rank"):
        Topology(nodes)


@given(topology=topologies())
def test_shape_agrees_with_topology(topology: Topology) -> None:
    shape = topology.shape
    for axis in AXES:
        groups = list(map(len, topology.groups(axis)))
        assert shape.group_sizes(axis) == tuple((size, groups.count(size)) for size in sorted(set(groups)))
    for counted in ("num_ranks", "num_nodes", "largest_node", "is_regular"):
        assert getattr(shape, counted) == getattr(topology, counted)


@given(topology=topologies())
def test_places_are_indices_in_groups(topology: Topology) -> None:
    for axis in AXES:
        groups = [topology.members(axis, rank) for rank in range(topology.num_ranks)]
        expected = {rank: (group.index(rank), len(group)) for rank, group in enumerate(groups) if group}
        assert topology.places(axis) == expected


def test_a_regular_shape_is_the_shape_of_regular_nodes() -> None:
    assert ClusterShape.regular(3, 4) == regular(3, 4).shape
    million = ClusterShape.regular(125_000, 8)
    assert (million.num_ranks, million.group_sizes("inter_node")) == (1_000_000, ((125_000, 8),))


@pytest.mark.parametrize("node_sizes", [(), ((0, 2),), ((2, 0),), ((4, 1), (2, 1)), ((2, 1), (2, 1))])
def test_a_shape_needs_distinct_ascending_sizes(node_sizes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        ClusterShape(node_sizes)


@given(st.sets(st.integers(0, 20), min_size=1).map(sorted))
def test_runs_are_the_fewest_that_cover_exactly_these_ranks(ranks: list[int]) -> None:
    runs = runs_of(ranks)
    assert [rank for begin, end in runs for rank in range(begin, end)] == ranks
    assert all(end < begin for (_, end), (begin, _) in pairwise(runs))
