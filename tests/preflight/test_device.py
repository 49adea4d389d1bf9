import pytest

from megabatch.precision.policy import PRECISIONS, PrecisionSettings
from megabatch.training.device import warn_of_device


@pytest.mark.parametrize("name", PRECISIONS)
def test_fp16_on_a_cpu_is_warned_of_and_nothing_else(name: str) -> None:
    on_cpu = warn_of_device(PrecisionSettings(name=name), "cpu")
    assert bool(on_cpu) == (name in ("fp16", "amp"))
    assert not warn_of_device(PrecisionSettings(name=name), "cuda")
    for line in on_cpu:
        assert (
            line.startswith(f"precision.name={name} ") and "precision.name=fp32, or bf16" in line and "\n" not in line
        )
