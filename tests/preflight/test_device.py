import pytest
import torch

from megabatch.precision.policy import PRECISIONS, PrecisionSettings
from megabatch.training.device import warn_of_device


@pytest.mark.parametrize("name", PRECISIONS)
def test_only_fp16_on_a_cpu_is_a_warning(name: str) -> None:
    on_cpu = warn_of_device(PrecisionSettings(name=name), "cpu")
    assert bool(on_cpu) == (name in ("fp16", "amp"))
    for line in on_cpu:
        assert (
            line.startswith(f"precision.name={name} ") and "precision.name=fp32, or bf16" in line and "\n" not in line
        )


@pytest.mark.parametrize(
    ("gpu", "warned"),
    [((9, 0), ["fp32"]), ((8, 0), ["fp32"]), ((7, 5), []), (None, [])],
    ids=["H100", "A100", "T4", "none"],
)
def test_fp32_on_a_gpu_with_tf32_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int] | None, warned: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    lines = {name: warn_of_device(PrecisionSettings(name=name), "cuda") for name in PRECISIONS}
    assert [name for name in PRECISIONS if lines[name]] == warned
    assert all("\n" not in line and "precision.name=tf32" in line for found in lines.values() for line in found)
