import pytest
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.precision.cast import place_model, to_precision
from megabatch.precision.loss_scale import LossScale
from megabatch.precision.master_weights import MasterWeights, clone_tensors
from megabatch.precision.policy import PRECISIONS, PrecisionSettings, check_device

CPU = torch.device("cpu")
NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm(6),
    "rms": lambda: nn.RMSNorm(6),
    "response": lambda: nn.LocalResponseNorm(3),
}


def network(norm: str = "batch") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), NORMS[norm](), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("norm", NORMS)
def test_only_normalisation_stays_in_fp32(name: str, norm: str) -> None:
    model = network(norm)
    expected = model(torch.ones(2, 2, 6, 6))
    to_precision(model, PRECISIONS[name], CPU)
    dtype = PRECISIONS[name].model
    for module in model:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                assert tensor.dtype == (torch.float32 if module is model.get_submodule("1") else dtype)
    logits = model(torch.ones(2, 2, 6, 6, dtype=dtype))
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, atol=0.05, rtol=0.05)
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("name", ["fp16", "amp"])
def test_local_response_norm_does_not_overflow_although_its_squares_would(name: str) -> None:
    images = torch.full((1, 4, 2, 2), 1000.0)
    expected = nn.LocalResponseNorm(3)(images)
    model = nn.Sequential(nn.Identity(), nn.LocalResponseNorm(3))
    to_precision(model, PRECISIONS[name], CPU)
    torch.testing.assert_close(model(images.half()), expected.half())


def test_constant_tensors_are_saved_unrounded_and_changed_buffers_with_their_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    model.register_buffer("constant", torch.tensor([1 / 3, 1e6]))
    model.register_buffer("counter", torch.tensor(1 / 3))
    model[0].tied = model[0].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    master_weights = to_precision(model, PRECISIONS["fp16"], CPU)
    assert model[1].weight.dtype == model.constant.dtype == torch.float16
    assert all(torch.equal(tensor, before[name]) for name, tensor in master_weights.state_dict().items())
    model.get_buffer("counter").add_(1)
    assert master_weights.state_dict()["counter"].item() == model.get_buffer("counter").item()

    other = to_precision(
        network := nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)), PRECISIONS["fp16"], CPU
    )
    other.load_state_dict({name: tensor for name, tensor in before.items() if name in network.state_dict()})
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]) and torch.equal(network.state_dict()[name], before[name].half())


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp64", "amp", "amp-bf16"])
def test_weights_of_32_or_more_bits_need_no_master_weights(name: str) -> None:
    model = network().to(PRECISIONS[name].update)
    master_weights = to_precision(model, PRECISIONS[name], CPU)
    assert not master_weights.copies
    assert all(master_weights.weights[name] is parameter for name, parameter in master_weights.parameters.items())


def test_the_constructor_does_not_change_the_model() -> None:
    model, other = network(), network()
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()}
    MasterWeights(model, clone_tensors(other))
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_placed_model_is_cast_and_its_master_weights_are_not(name: str, channels_last: bool) -> None:
    model = network()
    before = clone_tensors(model)
    master_weights = place_model(model, PrecisionSettings(name=name), CPU, channels_last)
    cast = model.get_parameter("0.weight")
    assert cast.dtype == PRECISIONS[name].model
    for weight in (cast, master_weights.weights["0.weight"]):
        assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    for key, tensor in master_weights.state_dict().items():
        assert torch.equal(tensor, before[key].to(tensor.dtype))
        assert tensor.dtype == (PRECISIONS[name].update if tensor.is_floating_point() else before[key].dtype)


@pytest.mark.parametrize(("name", "dtype"), [("amp", torch.float16), ("amp-bf16", torch.bfloat16)])
def test_amp_computes_in_16_bits_and_keeps_fp32_weights_and_gradients(name: str, dtype: torch.dtype) -> None:
    model = network()
    to_precision(model, PRECISIONS[name], CPU)
    logits = model(torch.ones(2, 2, 6, 6))
    assert logits.dtype == dtype
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_master_weights_keep_updates_that_fp16_would_round_away() -> None:
    """A step of 1e-5 has no effect on an fp16 weight of 1, but a hundred of them change its master weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    master_weights = to_precision(model, PRECISIONS["fp16"], CPU)
    for _ in range(100):
        with torch.no_grad():
            master_weights.weights["weight"].add_(1e-5)
        master_weights.copy_to_model()
    assert master_weights.weights["weight"].item() == pytest.approx(1.001, rel=1e-5)
    assert model.weight.item() == torch.tensor(1.001).half().item() != 1.0


def test_copying_to_the_model_rounds_each_weight_to_nearest() -> None:
    model = network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    master_weights = to_precision(model, PRECISIONS["fp16"], CPU)
    master_weights.copy_to_model()
    for name, parameter in model.named_parameters():
        assert torch.equal(master_weights.weights[name], before[name])
        assert torch.equal(parameter, before[name].to(parameter.dtype))


def loaded(gradient: list[float], scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the optimizer's gradient after a backward pass that left `gradient` times `scale` in fp16."""
    model = nn.Linear(len(gradient), 1, bias=False)
    master_weights = to_precision(model, PRECISIONS["fp16"], CPU)
    model.weight.grad = (torch.tensor([gradient], dtype=torch.float64) * scale).half()
    overflowed = master_weights.load_gradients(LossScale("fixed", scale))
    return overflowed, master_weights.weights["weight"].grad


def test_gradients_are_unscaled_in_fp32() -> None:
    """1e-9 is 0 in fp16, so dividing by the scale in fp16 would lose it."""
    values = [1e-9, -3e-7, 2e-6]
    assert not torch.tensor(values[0]).half()
    overflowed, gradient = loaded(values, 2.0**24)
    assert not overflowed and gradient is not None and gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, torch.tensor([values]), rtol=2**-10, atol=0)


def test_an_overflow_is_detected_and_the_first_parameter_in_backward_named() -> None:
    assert loaded([1e-3, 1.0], 2.0**17)[0]
    model = network()
    master_weights = to_precision(model, PRECISIONS["fp16"], CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for name in ("1.weight", "0.weight"):  # BatchNorm's overflows first, in fp32, and makes the convolution's NaN
        weight = model.get_parameter(name)
        weight.grad = torch.full_like(weight, torch.inf if name == "1.weight" else torch.nan)
    assert master_weights.load_gradients(LossScale("dynamic", 256.0))
    assert master_weights.first_overflow() == "1.weight"


def test_a_precision_that_the_device_lacks_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRECISIONS:
        check_device(PrecisionSettings(name=name), CPU)

    def refuse(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"conv2d not implemented for {tensors[0].dtype}")

    monkeypatch.setattr("torch.nn.functional.conv2d", refuse)
    with pytest.raises(UserError, match=r"precision.name='fp16' .*cpu.*nearest: precision.name=fp32"):
        check_device(PrecisionSettings(name="fp16"), CPU)
