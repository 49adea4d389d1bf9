"""Models of torchvision and timm, also beside a torchvision whose compiled extension does not match torch."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megabatch import torch_api
from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings, build_model, model_errors

pytestmark = pytest.mark.ranks  # trains in processes

SMALL = [
    "batch.global=8",
    "batch.micro=4",
    "train.epochs=1",
    "schedule.warmup_epochs=0",
    "data.synthetic={train=8,test=4,classes=4,channels=3}",
]
# A network whose forward calls an operator of torchvision's extension.
CODE = """
import torch, torchvision
from torch import nn
class Net(nn.Sequential):
    def forward(self, images):
        torchvision.ops.nms(torch.rand(3, 4), torch.rand(3), 0.5)
        return super().forward(images)
def net(num_classes):
    return Net(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))
"""


def train(*settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabatch", "train", "smoke", "--ranks", "1", *SMALL, *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def needs_mismatch() -> None:
    if not torch_api.lacks_extension():
        pytest.skip("needs a torchvision whose compiled extension does not load")


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torchvision.models:resnet18", "{}"),
        ("timm:create_model", '{model_name="resnet10t"}'),
    ],
)
def test_process_trains_a_model_by_name(
    name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name.partition(":")[0], reason=f"needs {name.partition(':')[0]}")
    monkeypatch.chdir(tmp_path)
    result = train(f"model.name={name}", f"model.options={options}", "data.image_size=32")
    assert result.returncode == 0, result.stderr
    assert Path("runs/smoke-001/model.safetensors").is_file() and "Traceback" not in result.stderr


@pytest.mark.usefixtures("torchvision")
def test_missing_operator_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_mismatch()
    monkeypatch.chdir(tmp_path)
    Path("boxes.py").write_text(CODE)
    result = train("model.name=boxes:net", "model.options={}")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("megabatch: model.name='boxes:net' calls torchvision's operator nms, and")
    assert line.endswith(f"does not match torch {torch.__version__}; install the torchvision build that matches torch")


class Calls(nn.Module):
    """A model that calls an operator by its name in torch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.ops.torchvision, self.name)(torch.rand(3, 4), torch.rand(3), 0.5)
        return found


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("name", ["nms", "qnms", "roi_align"])  # the last one is not even defined
def test_missing_operator_is_named(name: str) -> None:
    needs_mismatch()
    with pytest.raises(UserError, match=f"operator {name},"), model_errors(ModelSettings(name="mine:net")):
        Calls(name)(torch.ones(1))


@pytest.mark.usefixtures("torchvision")
def test_other_errors_are_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the import and of forward."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text('import torchvision\nraise RuntimeError("operator mine::nms does not exist")\n')
    with pytest.raises(RuntimeError, match="mine::nms"):
        build_model(ModelSettings(name="broken:net"), 1, 4, 3, 8)
    with pytest.raises(RuntimeError, match="mine"), model_errors(ModelSettings(name="mine:net")):
        raise RuntimeError("mine")
    assert torch_api.missing_operator(RuntimeError("mine")) is None


def test_operator_is_defined_once_and_only_if_torchvision_did_not(torchvision: ModuleType) -> None:
    torch_api.allow_torchvision_without_extension()
    assert sum(isinstance(finder, torch_api.OperatorDefiner) for finder in sys.meta_path) == 1
    for _ in range(2):
        torch_api.OperatorDefiner().find_spec("torchvision._meta_registrations", None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU")
    assert has_kernel != torch_api.lacks_extension()
    if torch_api.lacks_extension():
        assert torch_api.torchvision_operators().ns == "torchvision"


@pytest.mark.parametrize("name", ["torchvision.models:resnet18", "timm:create_model"])
def test_missing_package_is_a_one_line_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = name.partition(":")[0]
    for part in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(UserError, match=rf"^model.name='{name}' cannot be imported \(.*; .*install"):
        build_model(ModelSettings(name=name), 1, 4, 3, 8)
