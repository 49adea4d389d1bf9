"""A file of weights that names the wrong model gives a one-line error, uses no memory and runs no code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megabatch
from megabatch.errors import UserError
from megabatch.inference.classifier import NotInitialised
from megabatch.models.catalog import MODELS, ModelSettings, build_model

CARD: dict[str, Any] = {
    "model": {"name": "small_cnn", "options": {"width": 4}},
    "classes": ["bag", "boot", "shirt"],
    "num_channels": 3,
    "image_size": 12,
    "test_image_size": 12,
    "center_crop": 1.0,
    "mean": [1.0, 2.0, 3.0],
    "deviation": [1.0, 1.0, 1.0],
    "precision": "fp32",
    "recipe": {},
}


def write(path: Path, card: Any, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    state = MODELS["small_cnn"](3, 3, width=4).state_dict() | (tensors or {})
    text = card if isinstance(card, str) else json.dumps(card)
    save_file(state, path, {"megabatch": text})
    return path


def test_a_valid_file_is_loaded(tmp_path: Path) -> None:
    assert megabatch.load(write(tmp_path / "a", CARD)).classes == ("bag", "boot", "shirt")


LIES: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "a valid model"),
    ({"model": {"name": 5}}, "a valid model"),
    ({"model": {"name": "none"}}, "none"),
    ({"model": {"name": "small_cnn", "options": {"width": 10**9}}}, "does not fit small_cnn|fails"),
    ({"model": {"name": "small_cnn", "options": {"width": "x"}}}, "fails"),
    ({"model": {"name": "small_cnn", "options": {"width": 8}}}, "does not fit small_cnn"),
    ({"model": {"name": "alexnet"}, "image_size": 8192}, "does not fit|fails"),
    ({"classes": []}, "classes"),
    ({"classes": ["a"] * 10_000}, "does not fit"),
    ({"classes": ["a\n", "b", "c"]}, "not printable"),
    ({"num_channels": -1}, "num_channels"),
    ({"num_channels": 4}, "3 means and 3 deviations for 4 channels"),
    ({"test_image_size": 10**9}, "test_image_size"),
    ({"center_crop": 0}, "center_crop"),
    ({"mean": []}, "0 means"),
    ({"deviation": [0, 0, 0]}, "deviation"),
    ({"precision": "fp3"}, "precision.name"),
    ({"format": 10**30}, "another version"),
    ({"top1": 7.0}, "top1"),
]


@pytest.mark.parametrize(("other", "why"), LIES)
def test_a_false_model_card_is_refused_in_one_line(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        megabatch.load(write(tmp_path / "a", CARD | other))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[]", "[" * 100_000, "{}"])
def test_an_invalid_model_card_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="does not describe a model"):
        megabatch.load(write(tmp_path / "a", text))


@pytest.mark.parametrize("tensor", [torch.ones(7), torch.ones(4, 3, 3, 3, dtype=torch.int8)])
def test_a_tensor_that_is_not_a_weight_of_the_model_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(UserError, match="does not fit small_cnn"):
        megabatch.load(write(tmp_path / "a", CARD, {"0.0.weight": tensor}))


def test_images_too_small_for_the_network_are_refused_in_one_line(tmp_path: Path) -> None:
    classifier = megabatch.load(write(tmp_path / "a", CARD | {"test_image_size": 1}))
    with pytest.raises(UserError, match=r"model.name='small_cnn'.* fails on images \[1, 3, 1, 1\]"):
        classifier(torch.zeros(3, 20, 20, dtype=torch.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_comparing_a_model_of_any_size_uses_no_memory(name: str) -> None:
    with NotInitialised(), torch.device("meta"):
        model = build_model(ModelSettings(name=name), 0, 10**7, 3, 224)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_file_does_not_run_code_that_comes_with_it(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/hubconf.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\ndef net(**_): pass\n")
    options = {"repo_or_dir": str(tmp_path / "repository"), "model": "net", "source": "local"}
    with pytest.raises(UserError, match=r"torch.hub:load .*trust it, add"):
        megabatch.load(write(tmp_path / "a", CARD | {"model": {"name": "torch.hub:load", "options": options}}))
    assert not (tmp_path / "was-here").exists()
