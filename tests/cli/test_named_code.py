"""Run folders and model files are untrusted: Python code that they name is not imported."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import megabatch
from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.runs.files import CONFIG, WEIGHTS
from megabatch.runs.model_card import METADATA, ModelCard

FACTORY = "code_of_a_stranger:net"
# The module writes a file when it is imported.
CODE = """
from pathlib import Path
from torch import nn
Path("ran").touch()
def net(num_classes, in_channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""
READERS = {
    "eval": ["eval", "run"],
    "predict": ["predict", "run", "a.jpg"],
    "predict by a file": ["predict", f"run/{WEIGHTS}", "a.jpg"],
    "export": ["export", "run", "--torch", "model.pt2"],
    "show": ["show", "run"],
    "simulate": ["simulate", "run", "--cluster", "dgx1-v100", "--ranks", "8"],
    "doctor": ["doctor", "run"],
    "profile": ["profile", "run"],
    "resume": ["train", "--resume", "run"],
    "resume under its name": ["train", "smoke", "--resume", "run"],
    "preview": ["train", "--resume", "run", "--dry-run"],
    "plan": ["plan", f"run/{CONFIG}"],
    "lr-range": ["lr-range", f"run/{CONFIG}"],
    "chaos": ["chaos", f"run/{CONFIG}"],
}


@pytest.fixture(autouse=True)
def untrusted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, FACTORY.partition(":")[0], raising=False)
    (tmp_path / "code_of_a_stranger.py").write_text(CODE)
    (tmp_path / "a.jpg").touch()
    run = tmp_path / "run"
    run.mkdir()
    sizes = "data.synthetic={train=64,test=10,classes=4,channels=3}"
    config = load_config("smoke", [f"model.name={FACTORY}", "data.image_size=8", sizes])
    (run / CONFIG).write_text(config.to_toml())
    card = ModelCard(
        model={"name": FACTORY, "options": {}},
        classes=[f"class {number}" for number in range(4)],
        num_channels=3,
        image_size=8,
        test_image_size=8,
        center_crop=1.0,
        mean=[0.0] * 3,
        deviation=[1.0] * 3,
        precision="fp32",
        recipe={},
    )
    weights = {"1.weight": torch.zeros(4, 3 * 8**2), "1.bias": torch.zeros(4)}
    save_file(weights, run / WEIGHTS, metadata={METADATA: card.to_json()})


@pytest.mark.parametrize("arguments", READERS.values(), ids=READERS)
def test_code_named_by_a_run_is_not_imported(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and f"Python code, {FACTORY}," in str(result.exception)
    assert not Path("ran").exists()


@pytest.mark.parametrize("arguments", [["train", "--resume", "run"], ["lr-range", f"run/{CONFIG}"]])
def test_an_optimizer_named_by_a_run_is_not_imported(arguments: list[str]) -> None:
    settings = ["optim.name=code_of_a_stranger:net", "data.synthetic={train=64,test=10,classes=4,channels=3}"]
    Path(f"run/{CONFIG}").write_text(load_config("smoke", settings).to_toml())
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and "its optimizer is Python code, code_of" in str(result.exception)
    assert not Path("ran").exists()


def test_code_that_the_user_names_as_well_is_imported() -> None:
    result = CliRunner().invoke(app, ["eval", "run", "--model", FACTORY])
    assert result.exit_code == 0, result.output
    assert "on 10 samples" in result.output and Path("ran").exists()
    result = CliRunner().invoke(app, ["show", "run", f"model.name={FACTORY}"])
    assert result.exit_code == 0, result.output


def test_naming_code_that_differs_from_the_run_is_refused() -> None:
    result = CliRunner().invoke(app, ["eval", "run", "--model", "mine:net"])
    assert isinstance(result.exception, UserError)
    assert not Path("ran").exists()


def test_load_imports_only_the_model_that_the_caller_names() -> None:
    with pytest.raises(UserError, match=r"in Python: model='code_of_a_stranger:net'"):
        megabatch.load("run")
    assert not Path("ran").exists()
    assert megabatch.load("run", model=FACTORY).classes == ("class 0", "class 1", "class 2", "class 3")


def test_code_named_by_a_recipe_is_imported() -> None:
    Path(f"run/{CONFIG}").rename("mine.toml")
    assert CliRunner().invoke(app, ["show", "mine.toml"]).exit_code == 0
