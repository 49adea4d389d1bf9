import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS, flat, hierarchical, ring, torus
from megabatch.planning.plan import (
    BLOCK,
    COMM_DTYPES,
    Op,
    Phase,
    Plan,
    error_bound,
    largest_slice,
    padded_length,
    padded_slice_of,
    slice_of,
    slices,
    transfers,
)
from megabatch.planning.topology import ClusterShape, Topology, from_hosts, regular
from tests.support.enumerated import all_transfers
from tests.support.oracle import TORCH_DTYPES, Oracle, element_counts, every_plan, plans, topologies

dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**31)
# Below fp16's normal numbers, around 1, and up to where 12 contributions still stay below 65,504.
scales = st.sampled_from([1e-8, 1e-5, 1.0, 1e2])


def contributions(topology: Topology, num_elements: int, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(topology.num_ranks, num_elements, generator=generator, dtype=torch.float64) * scale)


def are_bitwise_identical(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)) for tensor in tensors)


@settings(max_examples=60)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds, scale=scales, dtype=dtypes)
def test_every_plan_gives_all_ranks_the_same_bits_within_the_error_bound(
    topology: Topology, num_elements: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    inputs = [tensor.to(dtype) for tensor in contributions(topology, num_elements, seed, scale)]
    exact = torch.stack(inputs).double().sum(dim=0)
    magnitudes = torch.stack(inputs).double().abs().sum(dim=0)
    for _, plan in plans(topology):
        results = Oracle(plan, topology, inputs).tensors
        assert are_bitwise_identical(results), plan
        bounds = [error_bound(plan, topology.num_ranks, magnitude) for magnitude in magnitudes.tolist()]
        errors = (results[0].double() - exact).abs()
        assert (errors <= torch.tensor(bounds, dtype=torch.float64)).all(), plan


@settings(max_examples=25)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds)
def test_integers_exact_in_every_dtype_are_summed_exactly(topology: Topology, num_elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = list(torch.randint(-10, 11, (topology.num_ranks, num_elements), generator=generator).float())
    for _, plan in plans(topology):
        assert torch.equal(Oracle(plan, topology, inputs).tensors[0], torch.stack(inputs).sum(dim=0)), plan


@settings(max_examples=25)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds)
def test_an_unrounded_plan_keeps_the_precision_of_float64(topology: Topology, num_elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = list(torch.randint(2**48, (topology.num_ranks, num_elements), generator=generator).double())
    for comm_dtype, plan in plans(topology):
        if comm_dtype == "same":
            assert torch.equal(Oracle(plan, topology, inputs).tensors[0], torch.stack(inputs).sum(dim=0)), plan


@settings(max_examples=25)
@given(topology=topologies(), seed=seeds)
def test_results_of_a_16_bit_plan_are_16_bit_numbers_on_every_rank(topology: Topology, seed: int) -> None:
    inputs = [tensor.float() for tensor in contributions(topology, 37, seed)]
    for comm_dtype, plan in plans(topology):
        if any(phase.dtype != "same" for phase in plan.phases):
            result = Oracle(plan, topology, inputs).tensors[0]
            assert torch.equal(result, result.to(TORCH_DTYPES[comm_dtype]).float()), plan


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overflow_reaches_every_rank(algorithm: str) -> None:
    topology = regular(2, 2)
    plan = ALGORITHMS[algorithm](topology.shape, "fp16")
    assert plan
    results = Oracle(plan, topology, [torch.tensor([30_000.0, 1.0])] * 4).tensors
    assert all(result.tolist() == [torch.inf, 4.0] for result in results)


def test_the_bound_hardly_grows_with_ranks() -> None:
    for dtype, format in COMM_DTYPES.items():
        few, many = (error_bound(Plan("", (Phase("all_reduce", "all", dtype),)), ranks, 1.0) for ranks in (2, 2048))
        assert many < 1.01 * few + 2048 * (2.0**-24 + format.underflow) * 1.01
    assert error_bound(Plan("", ()), 4, 1.0, roundoff=2.0**-53) == pytest.approx(2.0**-51)


@given(num_elements=st.integers(0, 5000), parts=st.integers(1, 40))
def test_slices_cover_every_element_once_and_are_nearly_equal(num_elements: int, parts: int) -> None:
    made = slices(num_elements, parts)
    assert len(made) == parts
    assert [element for begin, end in made for element in range(begin, end)] == list(range(num_elements))
    lengths = [end - begin for begin, end in made]
    if num_elements >= BLOCK * parts:
        assert all(begin % BLOCK == 0 for begin, _ in made)
        assert max(lengths) - min(lengths) < 2 * BLOCK
        assert min(lengths) > 0
    else:
        assert max(lengths) - min(lengths) <= 1


@given(num_elements=st.integers(0, 5000), parts=st.integers(1, 400))
def test_slice_of_and_largest_slice_agree_with_slices(num_elements: int, parts: int) -> None:
    made = slices(num_elements, parts)
    assert [slice_of(num_elements, parts, index) for index in range(parts)] == made
    assert largest_slice(num_elements, parts) == max(end - begin for begin, end in made)


@given(num_elements=st.integers(0, 5000), parts=st.integers(1, 400))
def test_padded_slices_cover_every_element_with_less_than_a_block_of_padding_each(
    num_elements: int, parts: int
) -> None:
    length = padded_length(num_elements, parts)
    assert length % BLOCK == 0 and num_elements <= parts * length < num_elements + parts * BLOCK
    made = [padded_slice_of(num_elements, parts, index) for index in range(parts)]
    assert [element for begin, end in made for element in range(begin, end)] == list(range(num_elements))
    assert all(begin == min(index * length, num_elements) for index, (begin, _) in enumerate(made))


@given(topology=topologies(), num_elements=element_counts())
def test_padded_slices_work_in_every_plan(topology: Topology, num_elements: int) -> None:
    """The members of a group hold the same elements, and every rank ends with all of them."""
    for _, plan in plans(topology):
        for rank in range(topology.num_ranks):
            made = [step for step in transfers(plan, topology, rank, num_elements, padded_slice_of) if step]
            assert all((step.begin, step.end) == (0, num_elements) for step in made[-1:])


def test_transfers_list_members_and_elements_of_each_phase() -> None:
    topology = from_hosts(["a", "b", "b", "a"])
    plan = torus(topology.shape, "bf16")
    assert plan
    assert transfers(plan, topology, 0, 70) == [((0, 3), 0, 70), ((0, 1), 0, 32), ((0, 3), 0, 70)]
    assert transfers(plan, topology, 2, 70) == [((1, 2), 0, 70), ((2, 3), 32, 70), ((1, 2), 0, 70)]


def test_only_leaders_take_part_among_leaders() -> None:
    topology = from_hosts("aab")
    plan = hierarchical(topology.shape, "same")
    assert plan
    assert transfers(plan, topology, 1, 70) == [((0, 1), 0, 70), None, ((0, 1), 0, 70)]
    assert transfers(plan, topology, 2, 70) == [((2,), 0, 70), ((0, 2), 0, 70), ((2,), 0, 70)]


@given(topology=topologies(), num_elements=element_counts())
def test_transfers_of_a_rank_equal_an_enumeration_of_groups(topology: Topology, num_elements: int) -> None:
    for plan in every_plan(topology):
        enumerated = all_transfers(plan, topology, num_elements)
        for rank in range(topology.num_ranks):
            own = [next((group for group in groups if rank in group.members), None) for groups in enumerated]
            assert transfers(plan, topology, rank, num_elements) == own, plan


def test_a_plan_whose_members_hold_different_elements_is_rejected() -> None:
    wrong = Plan("wrong", (Phase("reduce_scatter", "node", "same"), Phase("all_reduce", "all", "same")))
    with pytest.raises(AssertionError, match="hold different elements"):
        transfers(wrong, regular(2, 2), 0, 8)
    partly = Plan("partly", (Phase("reduce_scatter", "leaders", "same"), Phase("all_reduce", "node", "same")))
    for rank in range(4):
        with pytest.raises(AssertionError, match="hold different elements"):
            transfers(partly, regular(2, 2), rank, 8)


@pytest.mark.parametrize("phases", [["all_gather"], ["reduce_scatter", "all_gather", "all_gather"]])
def test_an_all_gather_without_reduce_scatter_is_rejected(phases: list[Op]) -> None:
    with pytest.raises(AssertionError, match="follows no reduce_scatter"):
        transfers(Plan("wrong", tuple(Phase(op, "node", "same") for op in phases)), regular(2, 2), 0, 8)


def test_phases_with_one_member_are_left_out() -> None:
    for dtype in COMM_DTYPES:
        for algorithm in ALGORITHMS.values():
            alone = algorithm(ClusterShape.regular(1, 1), dtype)
            assert alone and alone.phases == ()
        for algorithm in (hierarchical, torus):
            one_node, one_rank_each = (algorithm(ClusterShape.regular(*shape), dtype) for shape in ((1, 4), (4, 1)))
            assert one_node and {phase.axis for phase in one_node.phases} == {"node"}
            assert one_rank_each and [phase.op for phase in one_rank_each.phases] == ["all_reduce"]


def test_only_torus_needs_equal_nodes() -> None:
    unequal = from_hosts("aab").shape
    assert torus(unequal, "same") is None
    assert flat(unequal, "same") and hierarchical(unequal, "same")


def test_a_plan_reads_as_one_line() -> None:
    lines = [str(algorithm(ClusterShape.regular(2, 2), "bf16")) for algorithm in ALGORITHMS.values()]
    assert lines == [
        "flat/bf16: all_reduce over all ranks in bf16",
        "hierarchical/bf16: reduce in the node, all_reduce among leaders in bf16, broadcast in the node",
        "torus/bf16: reduce_scatter in the node, all_reduce between nodes in bf16, all_gather in the node",
    ]
    assert str(flat(ClusterShape.regular(1, 1), "same")) == "flat: nothing to exchange"
    assert [str(ring(ClusterShape.regular(2, 2), dtype)) for dtype in ("same", "bf16")] == [
        "ring: all_reduce over all ranks by the backend's ring",
        "ring/bf16: all_reduce over all ranks in bf16 by the backend's ring, rounded at every hop",
    ]


def test_plan_and_topology_round_trip_through_json() -> None:
    topology = from_hosts("abab")
    plan = torus(topology.shape, "fp16")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology
