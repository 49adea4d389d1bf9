from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megabatch.comm.api import distribute
from megabatch.comm.faults.failure import FailureHandler
from megabatch.comm.gradient_all_reduce import PlansInUse, require_plan
from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.topology import ClusterShape, from_hosts
from megabatch.ranks.world import connect, current_rank

EQUAL, UNEQUAL = ClusterShape.regular(2, 2), from_hosts(["a", "a", "b"]).shape


def test_auto_uses_shared_memory_if_available() -> None:
    names = {
        (shape, in_memory): require_plan("auto", "same", shape, in_memory).name
        for shape in (EQUAL, UNEQUAL)
        for in_memory in (True, False)
    }
    assert names == {
        (EQUAL, True): "torus",
        (UNEQUAL, True): "hierarchical",
        (EQUAL, False): "flat",
        (UNEQUAL, False): "flat",
    }


def test_named_algorithm_is_used_or_rejected() -> None:
    settings = CommSettings(algorithm="flat", dtype="bf16")
    plans = PlansInUse(settings, EQUAL, in_memory=True, on_accelerators=False, tunes=True)
    assert [plans.default.name, plans.exact.name, plans.names] == ["flat/bf16", "flat", "flat/bf16"]
    assert plans.candidates == [plans.default] and plans.axes == {"all"}
    with pytest.raises(UserError, match=r"comm.algorithm='torus' .*equally many.* 1 and 2"):
        require_plan("torus", "same", UNEQUAL, in_memory=True)
    with pytest.raises(UserError, match=r"comm.algorithm='taurus'.*torus"):
        CommSettings(algorithm="taurus")


@pytest.mark.parametrize(("how", "failures"), [("closed", []), ("failed", [ValueError])])
def test_closing_a_generator_that_trains_is_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, how: str, failures: list[type[Exception]]
) -> None:
    """Communicators are aborted on a failure, which can hang healthy ranks."""
    found: list[type[BaseException]] = []
    monkeypatch.setattr(FailureHandler, "leave", lambda report, error: found.append(type(error)))
    with connect(current_rank(), "cpu") as world:
        model, gradients = distribute(nn.Linear(2, 2), world, CommSettings())

        def steps() -> Iterator[None]:
            with gradients:
                while True:
                    model(torch.ones(1, 2)).sum().backward()
                    yield

        training = steps()
        next(training)
        if how == "closed":
            training.close()
        else:
            with pytest.raises(ValueError, match="a problem"):
                training.throw(ValueError("a problem"))
    assert found == failures
