"""16-bit runs on real ranks: casts, overflows, and steps at huge batch sizes."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch.precision.loss_scale as loss_scale
from megabatch.comm.api import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline import normalise
from megabatch.data.pipeline.images import ArrayImages, DataSet
from megabatch.errors import Diverged, UserError
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training.checkpoint.state import restore_training_state, training_state
from megabatch.training.evaluate import Evaluation
from megabatch.training.loop import train
from megabatch.training.parts import Training
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
NOT_EVALUATED = Evaluation(top1=0.0, top5=0.0, test_loss=0.0, class_top1=[], samples_evaluated=0)
PRODUCTS = ("convolution", "convolution_backward", "addmm", "mm", "bmm", "matmul")


def begin(world: World, *overrides: str) -> Training:
    config = small_run(*overrides)
    return ready_to_train(config, load_data_set(config.data), world)


class Watch(TorchDispatchMode):
    """Records the dtypes of matrix products, and every cast to or from 16 bits as (from, to, address of the source)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, set[torch.dtype]]] = []
        self.casts: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in PRODUCTS:
            self.products.append((name, {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}))
        pairs = {"_to_copy": [(args[0], result)], "copy_": [(args[1], args[0])] if name == "copy_" else []}.get(
            name, []
        )
        if name == "_foreach_copy_":
            pairs = list(zip(args[1], args[0], strict=True))
        for source, target in pairs:
            if source.dtype != target.dtype and (source.dtype in SIXTEEN_BITS or target.dtype in SIXTEEN_BITS):
                self.casts.append((source.dtype, target.dtype, source.data_ptr()))
        return result


def watch_a_step(world: World, precision: str) -> dict[str, Any]:
    training = begin(world, "batch.global=12", f"precision.name={precision}")  # three microbatches
    steps = train(training)
    next(steps)
    with Watch() as watch:
        next(steps)
    masters = [master.data_ptr() for master in training.master_weights.copies]
    return {
        "products": watch.products,
        "casts": [(source, target) for source, target, _ in watch.casts],
        "weights": [sum(address == master for *_, address in watch.casts) for master in masters],
        "gradients": [
            sum(address == weight.grad.data_ptr() for *_, address in watch.casts)
            for weight in training.master_weights.rounded_parameters
            if weight.grad is not None
        ],
    }


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_products_are_16_bit_and_nothing_is_cast_twice(ranks: RankPool, precision: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    seen = ranks.run(watch_a_step, precision, num_ranks=1)[0]
    names = {name for name, _ in seen["products"]}
    assert {"convolution", "convolution_backward", "addmm", "mm"} <= names
    assert all(formats == {dtype} for _, formats in seen["products"])
    assert len(seen["weights"]) == 6  # four convolutions, and weight and bias of the linear layer
    assert set(seen["weights"]) == set(seen["gradients"]) == {1}
    narrowed, widened = (torch.float32, dtype), (dtype, torch.float32)
    # A microbatch casts its images, its logits and the gradient of the logits; a step casts weights and gradients.
    assert sorted(map(str, seen["casts"])) == sorted(map(str, [narrowed] * (3 + 3 + 6) + [widened] * (3 + 6)))


def sum_in_backward(world: World, inputs: list[list[float]]) -> list[float]:
    """Return the gradient after backward: that of an fp16 weight is its input, so this is the sum over ranks."""
    model = nn.Linear(2, 1, bias=False, device=world.device).half()
    distributed, _ = distribute(model, world, CommSettings())
    distributed(torch.tensor([inputs[world.rank]], device=world.device).half()).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float16
    return model.weight.grad.flatten().tolist()


def test_sums_over_ranks_are_exact_even_if_fp16_sums_would_overflow_or_round(ranks: RankPool) -> None:
    """Check two sums that fail in fp16: 40,000 + 40,000 is inf, and 2,048 + 1 is 2,048."""
    results = ranks.run(sum_in_backward, [[4e4, 2048], [4e4, 1], [-4e4, 1]], num_ranks=3)
    assert results == [[4e4, 2050]] * 3


def state_of(training: Training) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy().copy() for name, tensor in training_state(training).items()}


def skip_the_third(world: World, *overrides: str) -> dict[str, Any]:
    training = begin(world, *overrides)
    steps = train(training)
    next(steps), next(steps)
    before = state_of(training)
    training.loss_scale.value *= 2.0**80
    skipped, after = next(steps), state_of(training)
    training.loss_scale.value = float(before["loss_scale"][0])
    went_on = next(steps)

    other = begin(world, *overrides)  # takes the fourth step's samples with the weights of the second
    restore_training_state(other, {name: torch.from_numpy(array) for name, array in before.items()})
    expected = next(train(other, first_step=3))
    return {"before": before, "after": after, "records": [skipped, went_on], "expected": expected}


@pytest.mark.parametrize(
    "overrides", [("precision.name=fp16",), ("precision.name=amp",), ("comm.dtype=fp16", "comm.algorithm=flat")]
)
def test_an_overflowed_step_changes_only_the_position_on_every_rank(ranks: RankPool, overrides: tuple[str]) -> None:
    results = ranks.run(skip_the_third, *overrides, num_ranks=2)
    for result in results:
        (skipped, went_on), expected = result["records"], result["expected"]
        assert (skipped.step, skipped.skipped, went_on.step, went_on.skipped) == (3, True, 4, False)
        assert went_on.loss == expected.loss and np.isfinite(skipped.loss)
        before, after = result["before"], result["after"]
        assert any("running_var" in name for name in before) and any("momentum" in name for name in before)
        for name in before.keys() - {"loss_scale"}:
            assert np.array_equal(before[name], after[name]), name
        assert after["loss_scale"].tolist() == [before["loss_scale"][0] * 2.0**79, 0, 1]
    for name in results[0]["after"]:
        assert np.array_equal(results[0]["after"][name], results[1]["after"][name]), name


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, images: torch.Tensor) -> torch.Tensor:
        return images.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e30


class Overflowing(nn.Module):
    """A network whose gradients below `last` overflow at every scale."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.last = nn.Linear(4, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(Amplify.apply(self.second(self.first(images))).mean((2, 3)))


def overflow_for_ever(world: World, *overrides: str) -> tuple[list[float], str]:
    scales = []
    training = begin(
        world,
        "precision.name=fp16",
        "model.name=tests.training.test_precision:Overflowing",
        "model.options={}",
        *overrides,
    )
    try:
        for record in train(training):
            if isinstance(record, StepRecord):
                assert record.skipped
                scales.append(record.loss_scale)
    except UserError as error:
        return scales, str(error)
    raise AssertionError("the run did not stop")


def test_at_the_minimum_scale_the_run_ends_and_names_the_first_overflowing_parameter(ranks: RankPool) -> None:
    for scales, error in ranks.run(overflow_for_ever, num_ranks=2):
        assert scales == [2.0**power for power in range(13, 0, -1)]  # from 2^8 x 32
        assert error.startswith("the gradient of second.bias overflows at step 14 with a loss scale of 1, 14 steps")
        assert "14 steps in a row on ranks 0, 1 (microbatch 0);" in error
    for scales, error in ranks.run(overflow_for_ever, "precision.loss_scale=16", num_ranks=1):
        assert scales == [16.0] * 19
        assert (
            "overflows at step 20 with a loss scale of 16, 20 steps in a row on rank 0 (microbatch 0); omit "
            "precision.loss_scale" in error
        )


def broken_images(world: World, measured: int) -> str:
    """Return the error for a NaN in sample 77 of 200: raised at start if it is among those measured, or in its step."""
    config = small_run("precision.name=fp32", "data.flip=false", "data.crop_padding=0")
    data = load_data_set(config.data)
    images = data.train.read(np.arange(200)).float()
    images[77, 0, 3, 3] = torch.nan
    normalise.MEASURED_SAMPLES = measured
    try:
        broken = DataSet(ArrayImages(images, data.train.labels), data.test, data.class_names, data.num_channels)
        for _ in train(ready_to_train(config, broken, world)):
            pass
    except UserError as error:
        assert not isinstance(error, Diverged)  # the image is the cause; another learning rate does not help
        return str(error)
    finally:
        normalise.MEASURED_SAMPLES = 50_000
    raise AssertionError("the run did not stop")


def test_a_non_finite_image_is_named(ranks: RankPool) -> None:
    at_once, in_its_step = (ranks.run(broken_images, measured, num_ranks=2) for measured in (200, 10))
    assert at_once == ["image 77 of the training set is not finite; fix or remove it"] * 2
    assert in_its_step[0] == in_its_step[1]
    assert "the loss is nan at step " in in_its_step[0] and "has image 77 of the training set" in in_its_step[0]


def leave_the_range(world: World) -> str:
    training = begin(world, "precision.name=fp32", "optim.learning_rate=1e6", "schedule.warmup_epochs=0")
    try:
        for _ in train(training):
            pass
    except Diverged as error:
        return str(error)
    raise AssertionError("the run did not stop")


def test_a_non_finite_loss_is_reported_in_one_line_with_step_and_microbatch(ranks: RankPool) -> None:
    first, second = ranks.run(leave_the_range, num_ranks=2)
    assert first == second
    assert re.search(r"at step \d+: microbatch 0, whose images are finite \(learning rate \d\.\d+e\+05\); lower", first)


def one_huge_step(world: World, *overrides: str) -> dict[str, np.ndarray]:
    """Return the update of each weight in one step at batch 65,536."""
    config = load_config(
        "smoke",
        [
            "model.options.width=2",
            "data.image_size=8",
            "data.synthetic={train=65536, test=8, classes=4, channels=1}",
            "batch.global=65536",
            "batch.micro=4096",
            "optim.weight_decay=1e-3",
            "optim.clip_norm=0.5",
            "schedule.warmup_epochs=0",
            "train.epochs=1",
            "run.threads=1",
            *overrides,
        ],
    )
    training = ready_to_train(config, load_data_set(config.data), world)
    before = {name: weight.detach().clone().double() for name, weight in training.master_weights.weights.items()}
    record = next(train(training))
    assert isinstance(record, StepRecord) and not record.skipped
    return {
        name: (weight.detach().double() - before[name]).numpy()
        for name, weight in training.master_weights.weights.items()
    }


def distance(update: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest relative error of a tensor's update."""
    return max(
        float(np.linalg.norm(update[name] - expected[name]) / np.linalg.norm(expected[name])) for name in expected
    )


def test_a_16_bit_step_at_batch_65536_is_the_step_in_fp64(ranks: RankPool) -> None:
    lars = ("optim.name=lars", "optim.learning_rate=10")
    exact = ranks.run(one_huge_step, "precision.name=fp64", *lars, num_ranks=2)[0]
    for scale, is_close in (
        (2.0**14, True),
        (1.0, False),
    ):  # without a scale, most gradients underflow in fp16
        overrides = ("precision.name=fp16", f"precision.loss_scale={scale}", *lars)
        update = ranks.run(one_huge_step, *overrides, num_ranks=2)[0]
        assert (distance(update, exact) < 0.05) == is_close


def scales_with_a_stop(world: World, stop: int) -> tuple[list[tuple[float, bool, float]], dict[str, np.ndarray]]:
    """Train with a scale that doubles every third step until it overflows; stop and resume after `stop` steps."""
    loss_scale.GROWTH_INTERVAL = 3
    scales, first_step = [], 0
    state: dict[str, np.ndarray] = {}
    for last in (stop, 15):
        training = begin(world, "precision.name=fp16", "train.epochs=2.4")  # 15 steps
        if state:
            restore_training_state(training, {name: torch.from_numpy(array) for name, array in state.items()})
        else:
            training.loss_scale.value = 2.0**20
        for record in train(training, first_step):
            if isinstance(record, StepRecord):
                scales.append((record.loss_scale, record.skipped, record.loss))
                if record.step == last:
                    break
        state, first_step = state_of(training), last
    return scales, state


def test_the_loss_scale_resumes_bitwise(ranks: RankPool) -> None:
    try:
        whole = ranks.run(scales_with_a_stop, 15, num_ranks=2)
        scales, expected = whole[0]
        assert {skipped for _, skipped, _ in scales} == {True, False} and len({scale for scale, *_ in scales}) > 3
        for stop in (2, 5, 9):
            for pieces, state in ranks.run(scales_with_a_stop, stop, num_ranks=2):
                assert pieces == scales
                assert all(np.array_equal(state[name], expected[name]) for name in expected)
    finally:
        ranks.close()  # these ranks double the scale every three steps
