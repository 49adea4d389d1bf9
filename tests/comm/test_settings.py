import pytest

from megabatch.comm.settings import CommSettings, choose_plan
from megabatch.errors import UserError
from megabatch.planning.topology import from_hosts, regular

UNEQUAL = from_hosts(["a", "a", "b"])


def test_auto_sums_in_memory_where_there_is_some() -> None:
    names = {
        (topology, in_memory): choose_plan(CommSettings(), topology, in_memory).name
        for topology in (regular(2, 2), UNEQUAL)
        for in_memory in (True, False)
    }
    assert names == {
        (regular(2, 2), True): "torus/fp32",
        (UNEQUAL, True): "hierarchical/fp32",
        (regular(2, 2), False): "flat/fp32",
        (UNEQUAL, False): "flat/fp32",
    }


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert choose_plan(CommSettings(algorithm="flat", wire="bf16"), regular(2, 2), True).name == "flat/bf16"
    with pytest.raises(UserError, match=r"comm.algorithm='torus' needs hosts with equally many ranks, not 1 and 2"):
        choose_plan(CommSettings(algorithm="torus"), UNEQUAL, True)
    with pytest.raises(UserError, match=r"comm.algorithm='taurus'.*torus"):
        CommSettings(algorithm="taurus")
