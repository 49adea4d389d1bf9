import pytest
from hypothesis import given

from megabatch.planning.topology import Topology, from_hosts, regular
from tests.support.oracle import regular_but_shuffled, topologies


@given(topology=topologies())
def test_the_groups_of_an_axis_are_ascending_and_share_no_rank(topology: Topology) -> None:
    for axis in ("all", "node", "masters", "across"):
        groups = topology.groups(axis)
        assert all(list(group) == sorted(group) and group for group in groups)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        if axis in ("all", "node"):
            assert sorted(ranks) == list(range(topology.num_ranks))


@given(topology=topologies())
def test_members_are_the_group_that_holds_the_rank(topology: Topology) -> None:
    for axis in ("all", "node", "masters", "across"):
        for rank in range(topology.num_ranks):
            holding = [group for group in topology.groups(axis) if rank in group]
            assert topology.members(axis, rank) == (holding[0] if holding else ())


@given(topology=topologies())
def test_masters_are_one_rank_of_every_node(topology: Topology) -> None:
    (masters,) = topology.groups("masters")
    assert [topology.members("node", master)[0] for master in masters] == list(masters)
    assert len(masters) == topology.num_nodes


@given(topology=regular_but_shuffled())
def test_in_equal_nodes_every_rank_meets_those_of_its_place_in_every_node(topology: Topology) -> None:
    def place(rank: int) -> int:
        return topology.members("node", rank).index(rank)

    for rank in range(topology.num_ranks):
        across = topology.members("across", rank)
        assert {place(other) for other in across} == {place(rank)}
        assert len(across) == topology.num_nodes


def test_ranks_dealt_out_to_hosts_in_turn_are_nodes_too() -> None:
    topology = from_hosts(["a", "b", "b", "a"])
    assert topology.nodes == ((0, 3), (1, 2))
    assert topology.groups("across") == [(0, 1), (2, 3)]
    assert from_hosts(["a", "a", "b", "b"]) == regular(2, 2)


def test_unequal_nodes_have_no_groups_across() -> None:
    topology = from_hosts("aab")
    assert not topology.is_regular and topology.largest_node == 2
    assert topology.groups("across") == [] and topology.members("across", 0) == ()


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), ()), ((0, 0),), ((1, 2),), ((1, 0),), ((1,), (0,))])
def test_a_rank_that_is_missing_double_or_out_of_order_is_no_topology(nodes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(AssertionError):
        Topology(nodes)
