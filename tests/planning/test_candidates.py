import pytest

from megabatch.planning.algorithms import candidate_plans, default_plan
from megabatch.planning.plan import CommDtype
from megabatch.planning.topology import ClusterShape

EQUAL, UNEQUAL, ONE_NODE = ClusterShape.regular(2, 2), ClusterShape(((1, 1), (2, 1))), ClusterShape.regular(1, 4)


def names(shape: ClusterShape, *, in_memory: bool, on_accelerators: bool = False, algorithm: str = "auto") -> list[str]:
    return [plan.name for plan in candidate_plans(algorithm, "fp32", shape, in_memory, on_accelerators)]


@pytest.mark.parametrize(
    ("shape", "in_memory", "name"),
    [
        (EQUAL, True, "torus/fp32"),
        (UNEQUAL, True, "hierarchical/fp32"),
        (EQUAL, False, "flat/fp32"),
        (UNEQUAL, False, "flat/fp32"),
    ],
)
def test_auto_exchanges_in_memory_where_there_is_some(shape: ClusterShape, in_memory: bool, name: str) -> None:
    plan = default_plan("auto", "fp32", shape, in_memory)
    assert plan and plan.name == name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_is_asked_for_is_taken_or_does_not_apply(dtype: CommDtype) -> None:
    plan = default_plan("flat", dtype, EQUAL, in_memory=True)
    assert plan and plan.name == f"flat/{dtype}"
    assert default_plan("torus", dtype, UNEQUAL, in_memory=True) is None
    assert candidate_plans("torus", dtype, UNEQUAL, in_memory=True, on_accelerators=True) == []


def test_between_nodes_auto_has_a_choice_wherever_nodes_exchange_faster_inside() -> None:
    everything = ["flat/fp32", "hierarchical/fp32", "torus/fp32"]
    assert names(EQUAL, in_memory=True) == names(EQUAL, in_memory=False, on_accelerators=True) == everything
    assert names(UNEQUAL, in_memory=True) == everything[:2]
    assert names(EQUAL, in_memory=False) == ["flat/fp32"]
    assert names(EQUAL, in_memory=True, algorithm="hierarchical") == ["hierarchical/fp32"]


def test_what_rounds_at_every_hop_is_taken_only_if_it_is_asked_for() -> None:
    plan = default_plan("ring", "bf16", EQUAL, in_memory=True)
    assert plan and plan.name == "ring/bf16" and [phase.engine for phase in plan.phases] == ["ring"]
    assert names(EQUAL, in_memory=True, on_accelerators=True, algorithm="ring") == ["ring/fp32"]
    chosen_from = candidate_plans("auto", "bf16", EQUAL, in_memory=False, on_accelerators=True)
    assert not any(phase.engine for plan in chosen_from for phase in plan.phases)


def test_in_one_node_there_is_no_choice() -> None:
    assert names(ONE_NODE, in_memory=True, on_accelerators=True) == ["torus/fp32"]
    assert names(ONE_NODE, in_memory=False, on_accelerators=True) == ["flat/fp32"]


def test_leaders_that_are_all_ranks_are_no_choice_of_their_own() -> None:
    assert names(ClusterShape.regular(4, 1), in_memory=True) == ["flat/fp32", "torus/fp32"]
