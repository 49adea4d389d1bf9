import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.models.catalog import MODELS


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `load`, so that it returns a small classifier."""
    module = ModuleType("megabatch.inference.classifier")
    card = SimpleNamespace(mean=[90.0], deviation=[40.0], center_crop=1.0)
    classifier = SimpleNamespace(
        network=MODELS["small_cnn"](3, 1), card=card, classes=("a", "b", "c"), image_size=12, num_channels=1
    )
    module.load = lambda run, checkpoint=None, model=None: classifier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megabatch.inference.classifier", module)


def test_export_writes_a_program_and_prints_its_input(tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    result = CliRunner().invoke(app, ["export", "runs/x", "--torch", str(out), "--preprocessing"])
    assert result.exit_code == 0, result.output
    assert f"{out}: takes uint8 [N, 1, 12, 12]; scores on 8 images of noise agree" in result.output
    assert torch.export.load(out).module()(torch.zeros(2, 1, 12, 12, dtype=torch.uint8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "megabatch export runs/x: no format is given; add --torch OUT, --onnx OUT or --torchvision OUT"),
        (["--torch", "no/such/model.pt2"], "no/such/model.pt2 cannot be written: the folder no/such does not exist"),
        (["--torch", "."], ". cannot be written: it is a folder"),
        (["--torchvision", "model.pth"], "is not in torchvision"),
    ],
)
def test_export_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", "runs/x", *arguments])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
    assert not list(tmp_path.iterdir())
