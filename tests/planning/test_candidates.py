import pytest

from megabatch.planning.algorithms import candidate_plans, default_plan, plan_name
from megabatch.planning.cost import bytes_crossing
from megabatch.planning.plan import BLOCK, CommDtype
from megabatch.planning.topology import ClusterShape, Topology, from_hosts, regular

EQUAL, UNEQUAL, ONE_NODE = ClusterShape.regular(2, 2), ClusterShape(((1, 1), (2, 1))), ClusterShape.regular(1, 4)


def names(shape: ClusterShape, *, in_memory: bool, on_accelerators: bool = False, algorithm: str = "auto") -> list[str]:
    return [plan.name for plan in candidate_plans(algorithm, "same", shape, in_memory, on_accelerators)]


@pytest.mark.parametrize(
    ("shape", "in_memory", "name"),
    [
        (EQUAL, True, "torus"),
        (UNEQUAL, True, "hierarchical"),
        (EQUAL, False, "flat"),
        (UNEQUAL, False, "flat"),
    ],
)
def test_auto_uses_shared_memory_if_available(shape: ClusterShape, in_memory: bool, name: str) -> None:
    plan = default_plan("auto", "same", shape, in_memory)
    assert plan and plan.name == name


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bf16", 4), ("fp16", 4), ("same", 2)])
@pytest.mark.parametrize("topology", [regular(2, 8), regular(16, 8), regular(4, 1), from_hosts("aabccc")])
@pytest.mark.parametrize("in_memory", [True, False])
def test_default_plan_in_16_bits_sends_at_most_half_the_bytes_of_a_ring_in_fp32(
    topology: Topology, dtype: CommDtype, element_bytes: int, in_memory: bool
) -> None:
    """Check the statements of docs/gpus.md, communication.md and attach.md."""
    num_elements = 1_000_003

    def most_bytes(algorithm: str, dtype: CommDtype, element_bytes: int) -> int:
        plan = default_plan(algorithm, dtype, topology.shape, in_memory, in_16_bits=element_bytes == 2)
        assert plan
        return max(bytes_crossing(plan, topology, num_elements, element_bytes))

    ring = most_bytes("ring", "same", 4)
    rounded_up = 2 * 4 * BLOCK * topology.num_ranks  # slices are whole cache lines
    assert 0 < most_bytes("auto", dtype, element_bytes) <= ring / 2 + rounded_up
    if topology.largest_node == 8:
        assert most_bytes("flat", dtype, element_bytes) > ring


@pytest.mark.parametrize("dtype", ["same", "bf16", "fp16"])
def test_a_requested_algorithm_is_used_or_does_not_apply(dtype: CommDtype) -> None:
    plan = default_plan("flat", dtype, EQUAL, in_memory=True)
    assert plan and plan.name == plan_name("flat", dtype)
    assert default_plan("torus", dtype, UNEQUAL, in_memory=True) is None
    assert candidate_plans("torus", dtype, UNEQUAL, in_memory=True, on_accelerators=True) == []


def test_auto_has_a_choice_between_nodes_with_fast_links_inside() -> None:
    everything = ["flat", "hierarchical", "torus"]
    assert names(EQUAL, in_memory=True) == names(EQUAL, in_memory=False, on_accelerators=True) == everything
    assert names(UNEQUAL, in_memory=True) == everything[:2]
    assert names(EQUAL, in_memory=False) == ["flat"]
    assert names(EQUAL, in_memory=True, algorithm="hierarchical") == ["hierarchical"]


def test_accelerators_of_several_nodes_never_exchange_16_bits_among_all() -> None:
    for shape, expected in ((EQUAL, ["hierarchical", "torus"]), (UNEQUAL, ["hierarchical"])):
        of_gradients = candidate_plans("auto", "same", shape, in_memory=False, on_accelerators=True, in_16_bits=True)
        rounded = candidate_plans("auto", "bf16", shape, in_memory=False, on_accelerators=True)
        assert [plan.name for plan in of_gradients] == expected
        assert [plan.name for plan in rounded] == [f"{name}/bf16" for name in expected]
        assert not any(phase.axis == "all" for plan in [*of_gradients, *rounded] for phase in plan.phases)


def test_ring_is_used_only_on_request() -> None:
    plan = default_plan("ring", "bf16", EQUAL, in_memory=True)
    assert plan and plan.name == "ring/bf16" and [phase.backend for phase in plan.phases] == ["ring"]
    assert names(EQUAL, in_memory=True, on_accelerators=True, algorithm="ring") == ["ring"]
    chosen_from = candidate_plans("auto", "bf16", EQUAL, in_memory=False, on_accelerators=True)
    assert not any(phase.backend for plan in chosen_from for phase in plan.phases)


def test_one_node_has_one_candidate() -> None:
    assert names(ONE_NODE, in_memory=True, on_accelerators=True) == ["shared_memory"]
    assert names(ONE_NODE, in_memory=False, on_accelerators=True) == ["flat"]


def test_hierarchical_is_left_out_with_one_rank_per_node() -> None:
    assert names(ClusterShape.regular(4, 1), in_memory=True) == ["flat", "torus"]
