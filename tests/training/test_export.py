from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.normalise import Normalise
from megabatch.errors import UserError
from megabatch.inference import export
from megabatch.inference.export import (
    Exported,
    export_onnx,
    export_torch,
    export_torchvision,
    onnx_session,
    with_maxima,
)
from megabatch.models.catalog import MODELS
from megabatch.precision.cast import to_precision
from megabatch.precision.policy import PRECISIONS

MEAN, DEVIATION = (97.3, 11.0), (41.7, 93.1)


def in_use(network: nn.Module) -> nn.Module:
    """Return the network with BatchNorm statistics and weights that change their input."""
    torch.manual_seed(3)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            nn.init.uniform_(tensor, 0.5, 1.5) if "bias" not in name else nn.init.normal_(tensor)
    return network


def made(network: nn.Module, preprocessing: bool = False, size: int = 16) -> Exported:
    return Exported(
        network=network,
        mean=list(MEAN),
        deviation=list(DEVIATION),
        classes=["a", "b", "c", "d", "e"],
        center_crop=0.875,
        image_size=size,
        num_channels=2,
        preprocessing_inside=preprocessing,
    )


def small(name: str = "small_cnn") -> nn.Module:
    return in_use(MODELS[name](5, 2))


def evaluated(network: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Return the scores, computed as in the run's evaluation."""
    normalise = Normalise(PixelStatistics(MEAN, DEVIATION), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        scores: torch.Tensor = network.eval()(normalise(pixels))
    return scores


def pixels_of(count: int, size: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (count, 2, size, size), dtype=torch.uint8)


@pytest.mark.parametrize("preprocessing", [False, True])
def test_a_torch_program_gives_the_scores_of_evaluation(tmp_path: Path, preprocessing: bool) -> None:
    network = small().train()
    assert export_torch(made(network, preprocessing), tmp_path / "model.pt2") < 1e-6
    assert network.training
    program = torch.export.load(tmp_path / "model.pt2").module()
    normalise = Normalise(PixelStatistics(MEAN, DEVIATION), torch.device("cpu"), torch.float32)
    for count in (1, 5, 20):
        pixels = pixels_of(count)
        scores = program(pixels if preprocessing else normalise(pixels))
        torch.testing.assert_close(scores, evaluated(network, pixels))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_onnx_gives_the_top1_of_evaluation(tmp_path: Path) -> None:
    import onnx

    network = small()
    assert export_onnx(made(network, preprocessing=True), tmp_path / "model.onnx") < 1e-4
    run = onnx_session(tmp_path / "model.onnx")
    for count in (1, 50):
        pixels = pixels_of(count)
        scores, expected = run(pixels), evaluated(network, pixels)
        assert torch.equal(scores.argmax(1), expected.argmax(1))
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert '"classes": ["a", "b", "c", "d", "e"], "center_crop": 0.875' in properties["megabatch"]
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert {end.type.tensor_type.shape.dim[0].dim_param for end in (*graph.input, *graph.output)} == {"batch"}


def test_global_max_pools_are_replaced_for_onnx_without_changing_results() -> None:
    module = nn.Sequential(
        nn.AdaptiveMaxPool2d(3), nn.Sequential(nn.AdaptiveMaxPool2d(1)), nn.AdaptiveMaxPool2d((1, 1))
    )
    images = torch.randn(2, 3, 7, 5)
    expected = module(images)
    replaced = with_maxima(module)
    assert torch.equal(replaced(images), expected)
    assert [type(child) for child in replaced.modules() if isinstance(child, nn.AdaptiveMaxPool2d)] == [type(module[0])]


def test_missing_onnx_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "EXPORT_PACKAGES", ("torch", "onnx_of_nobody"))
    with pytest.raises(UserError, match=r"--onnx needs onnx_of_nobody; run pip install 'megabatch\[export\]'"):
        export_onnx(made(small()), tmp_path / "model.onnx")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "amp"])
def test_a_16_bit_network_is_exported_in_fp32(tmp_path: Path, precision: str) -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(784, 5))
    rounded = {name: tensor.to(PRECISIONS[precision].model).float() for name, tensor in network.state_dict().items()}
    to_precision(network, PRECISIONS[precision], torch.device("cpu"))
    export_torch(made(network, preprocessing=True), tmp_path / "model.pt2")
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(784, 5))
    plain.load_state_dict(rounded)
    scores = torch.export.load(tmp_path / "model.pt2").module()(pixels := pixels_of(4))
    torch.testing.assert_close(scores, evaluated(plain, pixels))


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        return self.head(flat if flat.sum() > 0 else -flat)  # type: ignore[no-any-return]


class OfEightImages(LooksAtValues):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.reshape(8, 512))  # type: ignore[no-any-return]


@pytest.mark.parametrize("network", [LooksAtValues(), OfEightImages()])
def test_a_network_that_cannot_be_exported_is_refused_in_one_line(tmp_path: Path, network: nn.Module) -> None:
    with pytest.raises(UserError, match=rf"{type(network).__name__} cannot be exported to torch.export \(") as error:
        export_torch(made(network), tmp_path / "model.pt2")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_program_with_different_results_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = small()
    trace = export.trace
    monkeypatch.setattr(export, "trace", lambda module, exported: trace(small("tiny_cnn"), exported))
    with pytest.raises(UserError, match="does not match the network"):
        export_torch(made(network), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_torchvision_loads_our_resnets_and_gives_the_same_scores(
    torchvision: ModuleType, tmp_path: Path, suffix: str
) -> None:
    from safetensors.torch import load_file

    ours, out = in_use(MODELS["resnet18"](5)).eval(), tmp_path / f"model.{suffix}"
    said = export_torchvision(made(ours), out)
    assert said.startswith("torchvision.models.resnet18(num_classes=5).load_state_dict(")
    theirs = torchvision.models.resnet18(num_classes=5).eval()
    theirs.load_state_dict(load_file(out) if suffix == "safetensors" else torch.load(out, weights_only=True))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), ours(images))


def test_torchvision_models_are_exported_unchanged(torchvision: ModuleType, tmp_path: Path) -> None:
    model = torchvision.models.mobilenet_v3_small(num_classes=5)
    assert export_torchvision(made(model), tmp_path / "model.pth").startswith("model.load_state_dict(")
    again = torchvision.models.mobilenet_v3_small(num_classes=5)
    again.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))


def test_a_model_that_torchvision_lacks_is_refused_in_one_line(tmp_path: Path) -> None:
    with torch.device("meta"):
        networks = [MODELS[name](5, 3) for name in ("alexnet", "small_resnet")]
    for network in networks:
        with pytest.raises(UserError, match="is not in torchvision"):
            export_torchvision(made(network), tmp_path / "model.pth")
    with pytest.raises(UserError, match="a state dict has no preprocessing"):
        export_torchvision(made(small(), preprocessing=True), tmp_path / "model.pth")
    assert not list(tmp_path.iterdir())
