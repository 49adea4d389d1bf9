import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.planning.pipeline import ELEMENT_BYTES, GradientDtype
from megabatch.simulate.workload import STORED, Layer, Workload, load_workload, scaled, timed_backward


def made_up(**changes: object) -> Workload:
    layers = [
        Layer(name="a", forward_flops=9.0, backward_flops=0.0, parameters={}, scales_with_area=True),  # frozen
        Layer(name="b", forward_flops=4.0, backward_flops=4.0, parameters={"b.w": 10}, scales_with_area=True),
        Layer(name="n", forward_flops=0.0, backward_flops=0.0, parameters={"n.w": 2, "n.b": 3}, scales_with_area=False),
        Layer(
            name="c", forward_flops=6.0, backward_flops=12.0, parameters={"c.w": 7, "c.b": 1}, scales_with_area=False
        ),
    ]
    workload = Workload(
        model="made_up",
        image_size=32,
        num_classes=10,
        layers=layers,
        activation_elements=100,
        index_bytes=8,
        takes_any_size=True,
    )
    return msgspec.structs.replace(workload, **changes)


def test_resnet50_has_the_published_flops_and_parameters() -> None:
    resnet50 = load_workload("resnet50")
    assert resnet50.num_parameters == 25_557_032
    # 4.09 billion multiply-adds: torchvision's table of weights and fvcore's count.
    assert resnet50.forward_flops / 2 == pytest.approx(4.09e9, rel=2e-3)
    convolutions = [layer for layer in resnet50.layers if layer.forward_flops]
    assert len(convolutions) == 53 + 1  # including four shortcuts, and fc
    assert sum(len(layer.parameters) for layer in resnet50.layers) == 161


def test_alexnet_is_caffes_with_two_groups() -> None:
    """Computed by hand from Krizhevsky's table: 2 x height x width x out x in/groups x kernel squared."""
    by_hand = {
        "conv1": 2 * 54 * 54 * 96 * 3 * 11 * 11,
        "conv2": 2 * 27 * 27 * 256 * 48 * 5 * 5,
        "conv3": 2 * 13 * 13 * 384 * 256 * 3 * 3,
        "conv4": 2 * 13 * 13 * 384 * 192 * 3 * 3,
        "conv5": 2 * 13 * 13 * 256 * 192 * 3 * 3,
        "fc6": 2 * 9216 * 4096,
        "fc7": 2 * 4096 * 4096,
        "fc8": 2 * 4096 * 1000,
    }
    for name in ("alexnet", "alexnet_bn"):
        layers = {layer.name: layer for layer in load_workload(name).layers if layer.forward_flops}
        assert {name: layer.forward_flops for name, layer in layers.items()} == by_hand
        factors = {name: layer.backward_flops / layer.forward_flops for name, layer in layers.items()}
        assert factors == dict.fromkeys(by_hand, 2.0) | {"conv1": 1.0}
    assert load_workload("alexnet").num_parameters == 60_965_224
    assert load_workload("alexnet_bn").num_parameters == 60_967_976


def test_unknown_network_error_names_the_stored_ones() -> None:
    with pytest.raises(UserError, match=r"'resnet5'.*resnet50, alexnet, alexnet_bn.*nearest: resnet50"):
        load_workload("resnet5")


def test_gradients_are_ready_when_backward_has_passed_their_layer() -> None:
    backward = timed_backward(made_up(), backward_s=1.9, fixed_s=0.3)
    assert backward.names == ["c.b", "c.w", "n.b", "n.w", "b.w"]
    assert [gradient.num_bytes for gradient in backward.gradients] == [4, 28, 12, 8, 40]
    # 0.1 s for each of three layers, 1.6 s for 16 FLOPs; nothing for the frozen one.
    assert backward.ready_s == pytest.approx([1.3, 1.3, 1.4, 1.4, 1.9])


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.2])
def test_backward_ends_with_the_first_layers_gradient(name: str, dtype: GradientDtype, fixed_s: float) -> None:
    workload = load_workload(name)
    backward = timed_backward(workload, 0.2, fixed_s, dtype)
    assert sorted(backward.names) == sorted(name for layer in workload.layers for name in layer.parameters)
    num_bytes = sum(gradient.num_bytes for gradient in backward.gradients)
    assert num_bytes == ELEMENT_BYTES[dtype] * workload.num_parameters
    assert list(backward.ready_s) == sorted(backward.ready_s)
    assert backward.ready_s[0] > 0
    assert backward.names[-1] == "conv1.weight"
    assert backward.ready_s[-1] == pytest.approx(0.2)


def test_only_spatial_layers_grow_with_the_area() -> None:
    larger = scaled(made_up(), 64)
    assert larger.image_size == 64
    assert [layer.forward_flops for layer in larger.layers] == [36.0, 16.0, 0.0, 6.0]
    assert [layer.backward_flops for layer in larger.layers] == [0.0, 16.0, 0.0, 12.0]
    assert larger.activation_bytes(2) == 4 * made_up().activation_bytes(2)
    assert larger.num_parameters == made_up().num_parameters
    assert scaled(larger, 32) == made_up()


def test_a_network_for_one_size_is_not_scaled() -> None:
    fixed = made_up(takes_any_size=False)
    assert scaled(fixed, 32) == fixed
    with pytest.raises(UserError, match=r"image_size=64: made_up was counted for 32 pixels.*nearest: image_size=32"):
        scaled(fixed, 64)
