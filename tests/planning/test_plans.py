import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.planning.algorithms import ALGORITHMS, flat, hierarchical, torus
from megabatch.planning.plan import BLOCK, WIRES, Phase, Plan, error_bound, exchanges, slices
from megabatch.planning.topology import Topology, from_hosts, regular
from tests.support.oracle import WIRE_DTYPES, Oracle, element_counts, plans, topologies

dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**31)
# Below fp16's normal numbers, around 1, and up to where 12 contributions still stay below 65,504.
scales = st.sampled_from([1e-8, 1e-5, 1.0, 1e2])


def contributions(topology: Topology, num_elements: int, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(topology.num_ranks, num_elements, generator=generator, dtype=torch.float64) * scale)


def are_the_same_bits(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)) for tensor in tensors)


@settings(max_examples=60)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds, scale=scales, dtype=dtypes)
def test_every_plan_sums_identically_on_all_ranks_within_the_bound_of_its_wire(
    topology: Topology, num_elements: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    inputs = [tensor.to(dtype) for tensor in contributions(topology, num_elements, seed, scale)]
    exact = torch.stack(inputs).double().sum(dim=0)
    magnitudes = torch.stack(inputs).double().abs().sum(dim=0)
    for _, plan in plans(topology):
        results = Oracle(plan, topology, inputs).tensors
        assert are_the_same_bits(results), plan
        bounds = [error_bound(plan, topology.num_ranks, magnitude) for magnitude in magnitudes.tolist()]
        errors = (results[0].double() - exact).abs()
        assert (errors <= torch.tensor(bounds, dtype=torch.float64)).all(), plan


@settings(max_examples=25)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds)
def test_whole_numbers_that_every_wire_holds_are_summed_exactly(
    topology: Topology, num_elements: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = list(torch.randint(-10, 11, (topology.num_ranks, num_elements), generator=generator).float())
    for _, plan in plans(topology):
        assert torch.equal(Oracle(plan, topology, inputs).tensors[0], torch.stack(inputs).sum(dim=0)), plan


@settings(max_examples=25)
@given(topology=topologies(), num_elements=element_counts(), seed=seeds)
def test_the_fp32_wire_leaves_a_float64_tensor_its_precision(topology: Topology, num_elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = list(torch.randint(2**48, (topology.num_ranks, num_elements), generator=generator).double())
    for wire, plan in plans(topology):
        if wire == "fp32":
            assert torch.equal(Oracle(plan, topology, inputs).tensors[0], torch.stack(inputs).sum(dim=0)), plan


@settings(max_examples=25)
@given(topology=topologies(), seed=seeds)
def test_what_a_16_bit_wire_brought_is_a_16_bit_number_on_every_rank(topology: Topology, seed: int) -> None:
    inputs = [tensor.float() for tensor in contributions(topology, 37, seed)]
    for wire, plan in plans(topology):
        if any(phase.wire != "fp32" for phase in plan.phases):
            result = Oracle(plan, topology, inputs).tensors[0]
            assert torch.equal(result, result.to(WIRE_DTYPES[wire]).float()), plan


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overflow_of_the_wire_reaches_every_rank(algorithm: str) -> None:
    topology = regular(2, 2)
    plan = ALGORITHMS[algorithm](topology, "fp16")
    assert plan
    results = Oracle(plan, topology, [torch.tensor([30_000.0, 1.0])] * 4).tensors
    assert all(result.tolist() == [torch.inf, 4.0] for result in results)


def test_the_bound_is_a_few_roundings_however_many_ranks_there_are() -> None:
    for wire, format in WIRES.items():
        few, many = (error_bound(Plan("", (Phase("all_reduce", "all", wire),)), ranks, 1.0) for ranks in (2, 2048))
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


def test_the_phases_of_a_plan_say_who_exchanges_what() -> None:
    topology = from_hosts(["a", "b", "b", "a"])
    plan = torus(topology, "bf16")
    assert plan
    assert exchanges(plan, topology, 70) == [
        [((0, 3), 0, 70), ((1, 2), 0, 70)],
        [((0, 1), 0, 32), ((2, 3), 32, 70)],
        [((0, 3), 0, 70), ((1, 2), 0, 70)],
    ]


def test_a_plan_whose_members_hold_different_elements_is_refused() -> None:
    wrong = Plan("wrong", (Phase("reduce_scatter", "node", "fp32"), Phase("all_reduce", "all", "fp32")))
    with pytest.raises(AssertionError, match="hold different elements"):
        exchanges(wrong, regular(2, 2), 8)


def test_a_phase_without_anybody_to_exchange_with_is_left_out() -> None:
    for wire in WIRES:
        for algorithm in ALGORITHMS.values():
            alone = algorithm(regular(1, 1), wire)
            assert alone and alone.phases == ()
        for algorithm in (hierarchical, torus):
            one_node, one_rank_each = algorithm(regular(1, 4), wire), algorithm(regular(4, 1), wire)
            assert one_node and {phase.axis for phase in one_node.phases} == {"node"}
            assert one_rank_each and [phase.op for phase in one_rank_each.phases] == ["all_reduce"]


def test_torus_alone_needs_equal_nodes() -> None:
    unequal = from_hosts("aab")
    assert torus(unequal, "fp32") is None
    assert flat(unequal, "fp32") and hierarchical(unequal, "fp32")


def test_a_plan_reads_as_one_line() -> None:
    lines = [str(algorithm(regular(2, 2), "bf16")) for algorithm in ALGORITHMS.values()]
    assert lines == [
        "flat/bf16: all_reduce over all ranks in bf16",
        "hierarchical/bf16: reduce in the node, all_reduce among masters in bf16, broadcast in the node",
        "torus/bf16: reduce_scatter in the node, all_reduce across in bf16, all_gather in the node",
    ]
    assert str(flat(regular(1, 1), "fp32")) == "flat/fp32: nothing to exchange"


def test_plan_and_topology_come_back_from_a_file_as_they_were() -> None:
    topology = from_hosts("abab")
    plan = torus(topology, "fp16")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology
