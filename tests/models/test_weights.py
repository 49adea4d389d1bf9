import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megabatch.errors import UserError
from megabatch.models.catalog import MODELS
from megabatch.models.resnet import resnet18
from megabatch.models.weights import match, read_weights, require_finite
from megabatch.runs.files import WEIGHTS
from megabatch.training.checkpoint.format import STATE
from megabatch.training.checkpoint.state import MODEL


def small(num_classes: int = 5, in_channels: int = 1) -> nn.Module:
    return MODELS["small_cnn"](num_classes, in_channels, width=4)


def same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "model_state"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_state_dict_is_found_in_wrapped_pickles(tmp_path: Path, wrap: str | None, prefix: str) -> None:
    model = small()
    state: dict[str, Any] = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / "a.pth")
    report = match(small(), read_weights(tmp_path / "a.pth"))
    assert same(report.tensors, model.state_dict())
    assert report.lines("a.pth") == ["from a.pth: 14 of 14 tensors"]


def test_files_runs_and_checkpoints_have_the_same_weights(tmp_path: Path) -> None:
    state = small().state_dict()
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoints/step-00000007"
    checkpoint.mkdir(parents=True)
    save_file(state, run / WEIGHTS)
    save_file(
        {f"{MODEL}{name}": tensor for name, tensor in state.items()} | {"scale": torch.ones(3)}, checkpoint / STATE
    )
    torch.save(state, tmp_path / "a.pt")
    for path in (run, run / WEIGHTS, checkpoint, tmp_path / "a.pt"):
        assert same(read_weights(path), state), path


def test_module_named_module_keeps_its_name() -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 3))
    assert match(model, model.state_dict()).num_fitting == 2


def test_head_of_another_size_keeps_its_initial_weight_and_bias() -> None:
    with torch.device("meta"):
        report = match(resnet18(num_classes=10), resnet18(num_classes=1000).state_dict())
    assert {"fc.weight", "fc.bias"}.isdisjoint(report.tensors) and len(report.tensors) == 120
    assert report.lines("resnet18.pth") == [
        "from resnet18.pth: 60 of 62 tensors",
        "new head: fc.weight is [1000, 512] in the file and [10, 512] in the model, "
        "fc.bias is [1000] in the file and [10] in the model",
    ]
    with torch.device("meta"):  # the bias would fit
        narrow = match(
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
            nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)).state_dict(),
        )
    assert list(narrow.tensors) == ["0.weight", "0.bias"]


def test_tensors_that_do_not_match_are_listed_and_shortened() -> None:
    weights = small(in_channels=3).state_dict()
    for name in ("2.1.running_mean", "2.1.num_batches_tracked"):
        del weights[name]
    weights |= {f"extra.{number}": torch.ones(1) for number in range(7)}
    assert match(small(), weights).lines("a.pth") == [
        "from a.pth: 13 of 14 tensors",
        "missing in it, left as initialised: 2.1.running_mean",
        "other shapes in it, left as initialised: 0.0.weight is [4, 3, 3, 3] in the file and [4, 1, 3, 3] in the model",
        "not in the model, ignored: extra.0, extra.1, extra.2 and 4 more",
    ]


def test_weights_take_the_dtype_of_the_model() -> None:
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in small().state_dict().items()}
    assert {t.dtype for t in match(small(), weights).tensors.values()} == {torch.float32, torch.int64}


def test_weights_of_another_model_are_a_one_line_error() -> None:
    message = r"none of its 122 tensors \(conv1.weight, .* and 119 more\) fits the model"
    with torch.device("meta"), pytest.raises(UserError, match=message):
        match(small(), resnet18(num_classes=10).state_dict())


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickle_does_not_execute_code(tmp_path: Path) -> None:
    torch.save(small().state_dict() | {"args": Harmful(tmp_path / "made")}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"a.pth .*\((posix|os)\.mkdir\).* run code") as error:
        read_weights(tmp_path / "a.pth")
    assert not (tmp_path / "made").exists() and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"garbage", r"a.safetensors cannot be read as safetensors \(.*\)"),
        ("a.pth", b"garbage", r"a.pth holds no state dict \(.*\)"),
        ("a.pth", b"PK\x03\x04garbage", r"a.pth cannot be read \(.*\)"),
        ("a.pth", b"", r"a.pth cannot be read \(.*\)"),
        ("a.h5", b"garbage", r"a.h5 is not one of .safetensors, .pth, .pt"),
        ("run/config.toml", b"", r"run has no model.safetensors"),
    ],
)
def test_unreadable_file_is_a_one_line_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_weights(path if path.suffix != ".toml" else path.parent)
    assert "\n" not in str(error.value)


def test_missing_or_empty_file_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.pth does not exist; pass"):
        read_weights(tmp_path / "none.pth")
    torch.save([torch.ones(3)], tmp_path / "list.pth")
    with pytest.raises(UserError, match=r"list.pth holds no tensors by name"):
        read_weights(tmp_path / "list.pth")


def test_weights_of_incompatible_dtypes_are_rejected() -> None:
    state = small().state_dict()
    name = next(iter(state))
    for dtype in (torch.int8, torch.complex64):
        with pytest.raises(UserError, match=f"{name} is {dtype} in the file and torch.float32 in the model"):
            match(small(), state | {name: state[name].to(dtype)})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_weights_with_inf_or_nan_in_the_dtype_of_the_model_are_rejected(value: float) -> None:
    state = small().state_dict()
    name = next(iter(state))
    spoiled = match(small(), state | {name: torch.full(state[name].shape, value, dtype=torch.float64)})
    with pytest.raises(UserError, match=f"{name} has inf or NaN"):
        require_finite(spoiled.tensors)
    require_finite(match(small(), state).tensors)


def test_compressed_pickle_is_rejected_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save(small().state_dict(), tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "a.pth") as plain, zipfile.ZipFile(tmp_path / "b.pth", "w") as packed:
        for member in plain.namelist():
            packed.writestr(member, plain.read(member), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="is a compressed zip"):
        read_weights(tmp_path / "b.pth")


def test_methods_replaced_by_a_pickle_are_not_called(tmp_path: Path) -> None:
    state = OrderedDict(small().state_dict())
    state.get = "no method"  # type: ignore[assignment, method-assign]
    parameter = nn.Parameter(torch.ones(3))
    parameter.to = "no method"  # type: ignore[assignment, method-assign]
    state["own"] = parameter
    torch.save(state, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth").keys() == {*small().state_dict(), "own"}
    assert type(read_weights(tmp_path / "a.pth")["own"]) is torch.Tensor


def test_sparse_tensors_are_rejected(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "a.pth")
    with pytest.raises(UserError, match="a is not a plain dense tensor"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_file_is_a_one_line_error_or_valid_weights(tmp_path: Path, suffix: str) -> None:
    path, draw, refused = tmp_path / f"a{suffix}", random.Random(1), 0
    (save_file if suffix == ".safetensors" else torch.save)(small().state_dict(), path)  # type: ignore[operator]
    content = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 2, 8])):
            damaged[draw.randrange(draw.choice([16, 2_000, len(damaged)]))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([len(damaged), len(damaged), draw.randrange(len(damaged))])])
        try:
            match(small(), read_weights(path)).lines("a")
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for suffix in (".pth", ".safetensors"):
        os.mkfifo(tmp_path / f"a{suffix}")
        with pytest.raises(UserError, match="not a regular file"):
            read_weights(tmp_path / f"a{suffix}")
