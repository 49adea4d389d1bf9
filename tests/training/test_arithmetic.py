"""A run sets torch's global flags and restores them when it ends."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.precision.policy import PRECISIONS, PrecisionSettings
from megabatch.ranks.world import current_rank
from megabatch.training.numerics import WORKSPACE, arithmetic, set_cublas_workspace
from megabatch.training.prepare import prepare
from tests.support.small_runs import small_run

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def readable(owner: Any) -> bool | None:
    """Return `allow_tf32`, or None if torch's older interface cannot be read."""
    try:
        return bool(owner.allow_tf32)
    except RuntimeError:
        return None


def flags() -> dict[str, Any]:
    return {
        "allowed": (readable(MATMUL), readable(CUDNN)),
        "precisions": (MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision),
        "cudnn": (CUDNN.benchmark, CUDNN.deterministic),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    }


def leave_alone() -> None: ...


def allow_all() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = True


def allow_none() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = False


def use_the_newer() -> None:
    MATMUL.fp32_precision = "tf32"
    CUDNN.conv.fp32_precision = "ieee"


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    CUDNN.benchmark, CUDNN.deterministic = True, True


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = flags()
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32 = before["allowed"]
    MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = before["precisions"]
    CUDNN.benchmark, CUDNN.deterministic = before["cudnn"]
    torch.use_deterministic_algorithms(before["deterministic"][0], warn_only=before["deterministic"][1])
    assert flags() == before


@pytest.mark.parametrize("set_before", [leave_alone, allow_all, allow_none, use_the_newer, be_deterministic])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_only_tf32_multiplies_in_tf32_and_flags_are_restored(
    name: str, deterministic: bool, set_before: Callable[[], None]
) -> None:
    set_before()
    before = flags()
    with arithmetic(PrecisionSettings(name=name), deterministic):
        now = flags()
        assert now["allowed"] == (name == "tf32", name == "tf32")
        assert set(now["precisions"]) == {"tf32" if name == "tf32" else "ieee"}
        assert now["cudnn"] == (not deterministic, deterministic)
        assert now["deterministic"] == ((True, False) if deterministic else before["deterministic"])
        with CUDNN.flags(enabled=True):  # as networks do
            pass
    after = flags()
    for then, now in zip(before.pop("allowed"), after.pop("allowed"), strict=True):
        assert then is None or now == then  # a flag that was not readable may be readable now
    assert after == before


class Scattered(nn.Module):
    """A module whose `put_` writes one index twice: torch has no deterministic form of it."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.linear(images.flatten(1))
        return logits + torch.zeros_like(logits).put_(torch.tensor([0, 0]), logits.new_ones(2), accumulate=False)


def test_an_operation_without_a_deterministic_form_is_refused_in_one_line() -> None:
    before = flags()
    settings = [f"model.name={__name__}:Scattered", "model.options={}"]
    with prepare(small_run(*settings), current_rank()):
        pass
    with (
        pytest.raises(
            UserError, match=r"^run.deterministic=true: put_ has no deterministic implementation .*; repla"
        ) as line,
        prepare(small_run(*settings, "run.deterministic=true"), current_rank()),
    ):
        pass
    assert "\n" not in str(line.value)
    assert flags() == before


def test_built_in_models_are_refused_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the error of AdaptiveMaxPool2d on CUDA inside `model_errors`."""
    refuse = "adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you set"

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(refuse)

    monkeypatch.setattr(nn.AdaptiveMaxPool2d, "forward", forward)
    expected = r"^run.deterministic=true: adaptive_max_pool2d_backward_cuda has no deterministic impl"
    with pytest.raises(UserError, match=expected), prepare(small_run("run.deterministic=true"), current_rank()):
        pass


def test_the_cublas_workspace_is_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    set_cublas_workspace(False, "cuda")
    set_cublas_workspace(True, "cpu")
    assert WORKSPACE not in os.environ
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=rf"CUDA started .* without {WORKSPACE}; set {WORKSPACE}=:4096:8 before"):
        set_cublas_workspace(True, "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_cublas_workspace(True, "cuda")
    set_cublas_workspace(True, "cuda")
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(UserError, match=rf"only with {WORKSPACE}=:4096:8 or :16:8, not :0:0; unset it$"):
        set_cublas_workspace(True, "cuda")
