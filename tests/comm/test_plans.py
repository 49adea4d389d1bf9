import pytest

from megabatch.comm.gradient_all_reduce import PlansInUse, require_plan
from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.topology import ClusterShape, from_hosts

EQUAL, UNEQUAL = ClusterShape.regular(2, 2), from_hosts(["a", "a", "b"]).shape


def test_auto_reduces_in_memory_where_there_is_some() -> None:
    names = {
        (shape, in_memory): require_plan("auto", "fp32", shape, in_memory).name
        for shape in (EQUAL, UNEQUAL)
        for in_memory in (True, False)
    }
    assert names == {
        (EQUAL, True): "torus/fp32",
        (UNEQUAL, True): "hierarchical/fp32",
        (EQUAL, False): "flat/fp32",
        (UNEQUAL, False): "flat/fp32",
    }


def test_what_is_asked_for_is_taken_or_refused() -> None:
    settings = CommSettings(algorithm="flat", dtype="bf16")
    plans = PlansInUse(settings, EQUAL, in_memory=True, on_accelerators=False, tunes=True)
    assert [plans.default.name, plans.exact.name, plans.names] == ["flat/bf16", "flat/fp32", "flat/bf16"]
    assert plans.candidates == [plans.default] and plans.axes == {"all"}
    with pytest.raises(UserError, match=r"comm.algorithm='torus' needs hosts with equally many ranks, not 1 and 2"):
        require_plan("torus", "fp32", UNEQUAL, in_memory=True)
    with pytest.raises(UserError, match=r"comm.algorithm='taurus'.*torus"):
        CommSettings(algorithm="taurus")
