"""The run does not depend on the number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megabatch.config.resolve import make_model, plan_learning_rate, plan_run
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.batches import TrainingImages
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.data.pipeline.order import dropout_seed
from megabatch.ranks.world import World
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run, train_small

# Two sizes, an average of the weights, class weights, balanced sampling, and draws per sample and per microbatch.
CHANGING = (
    *("data.sizes=[[0, 8], [0.5, 12]]", "train.ema_half_life_epochs=0.3", "train.ema_every_steps=3"),
    *("loss.class_weights={'class 1'=1.25}", "data.sampling=balanced"),
    *("data.flip=alternating", "data.augment={erase=0.2, brightness=0.1, repeats=2, mixup=0.1, cutmix=0.5}"),
)


Results = dict[int, list[dict[str, Any]]]  # by number of ranks, of each rank


@pytest.fixture(scope="module")
def by_ranks(ranks: RankPool) -> Results:
    return {
        num_ranks: ranks.run(train_small, *CHANGING, num_ranks=num_ranks)
        for num_ranks in (1, 2, 4)
        if num_ranks <= ranks.size
    }


def test_losses_agree_to_1e_9_and_all_top1_are_equal_on_1_2_and_4_ranks(
    by_ranks: Results,
) -> None:
    alone = by_ranks[1][0]
    assert len(alone["losses"]) == 50 and len(alone["evaluations"]) == 8
    for results in by_ranks.values():
        for result in results:
            np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=1e-9)
            assert result["top1s"] == alone["top1s"]
            for ours, theirs in zip(result["evaluations"], alone["evaluations"], strict=True):
                assert (ours.top1, ours.top5, ours.class_top1) == (theirs.top1, theirs.top5, theirs.class_top1)
                assert ours.raw_top1 == theirs.raw_top1 is not None
                assert ours.test_loss == pytest.approx(theirs.test_loss, abs=1e-9)
                assert ours.samples_evaluated == 37


def test_the_state_of_all_ranks_is_bitwise_identical_after_every_step(
    by_ranks: Results,
) -> None:
    for results in by_ranks.values():
        for result in results[1:]:
            assert result["losses"] == results[0]["losses"]
            assert all(np.array_equal(*pair) for pair in zip(result["norms"], results[0]["norms"], strict=True))
            for key, value in results[0]["state"].items():
                assert np.array_equal(result["state"][key], value), key
        assert any(key.startswith("average.") for key in results[0]["state"])


def test_the_run_learns(by_ranks: Results) -> None:
    assert by_ranks[1][0]["evaluations"][-1].top1 > 0.9


def test_fp32_agrees_to_1e_5_for_the_first_three_steps(ranks: RankPool) -> None:
    alone, *others = (
        ranks.run(train_small, "precision.name=fp32", "train.epochs=0.48", "schedule.warmup_epochs=0", num_ranks=n)[0]
        for n in (1, 2, 4)
        if n <= ranks.size
    )
    assert len(alone["losses"]) == 3
    for other in others:
        np.testing.assert_allclose(other["losses"], alone["losses"], rtol=0, atol=1e-5)


RESNET = [
    "model.name=resnet18",
    "model.options={stochastic_depth=0.4, blur_pool='all', zero_gamma=false}",
    "data.image_size=16",
    "batch.global=8",
    "train.steps=1",
    "data.synthetic.test=4",
    "schedule.warmup_epochs=0",
    "loss={name='bce', label_smoothing=0.1}",
    "optim={name='sgd', learning_rate=0.05, weight_decay=0.01, decoupled_decay=true, decay_all=true}",
]


def test_stochastic_depth_drops_the_same_samples_on_any_number_of_ranks(ranks: RankPool) -> None:
    alone, other = (ranks.run(train_small, *RESNET, num_ranks=num_ranks)[0] for num_ranks in (1, min(2, ranks.size)))
    np.testing.assert_allclose(other["losses"], alone["losses"], rtol=0, atol=1e-9)
    kept = ranks.run(train_small, *RESNET, "model.options.stochastic_depth=0.0", num_ranks=1)[0]
    assert len(alone["losses"]) == 1 and abs(kept["losses"][0] - alone["losses"][0]) > 1e-3


def collectives_of_a_step(world: World) -> tuple[int, list[str]]:
    """Return the collectives of one step after DDP's first ones: those in shared memory, and of the process group."""
    config = small_run()
    training = ready_to_train(config, load_data_set(config.data), world)
    records = train(training)
    next(records)
    memory = training.gradients.reducer.groups.memory
    before = memory.barrier.num_operations if memory else 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        next(records)
    operations = memory.barrier.num_operations - before if memory else 0
    return operations, [event.name for event in profiler.events() if event.name.startswith("c10d::")]


def test_a_step_is_one_bucket_and_one_small_all_reduce(ranks: RankPool) -> None:
    """Buffers are not broadcast; one all-reduce has loss, counts, statistics and the stop flag."""
    for operations, names in ranks.run(collectives_of_a_step, num_ranks=min(2, ranks.size)):
        assert (operations, names) in [(2, []), (0, ["c10d::allreduce_"] * 2)]


def plain_results() -> tuple[list[float], list[float]]:
    """Return losses and top-1 of a plain loop without DDP, its accumulation, or our BatchNorm and optimizer code."""
    config = small_run("optim.clip_norm=1.5")
    data = load_data_set(config.data)
    plan = plan_run(config, data.shape, 1)
    images = TrainingImages(data.train, config.data, config.seed, plan)
    normalise = Normalise(measure_pixels(data.train), torch.device("cpu"), torch.float64)
    learning_rate = plan_learning_rate(config, plan)
    model = make_model(config, data.shape).double()
    decays = {
        name: config.optim.weight_decay if parameter.ndim > 1 else 0.0 for name, parameter in model.named_parameters()
    }
    velocity = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    losses, top1s = [], []
    for step in range(plan.num_steps):
        loss, num_right = torch.zeros((), dtype=torch.float64), 0
        for index in range(8):
            pixels, labels = images.microbatch(step, index)
            torch.manual_seed(dropout_seed(config.seed, step, index))
            logits = model(normalise(pixels))
            loss = loss + F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1) / 32
            num_right += sum(max(row) == row[label] for row, label in zip(logits.tolist(), labels, strict=True))
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        top1s.append(num_right / 32)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            gradient = gradients[name] * min(1.0, 1.5 / (norm.item() + 1e-6)) + decays[name] * parameter.detach()
            velocity[name] = 0.9 * velocity[name] + gradient
            parameter.data -= learning_rate(step) * (gradient + 0.9 * velocity[name])
    return losses, top1s


def test_the_run_matches_a_plain_loop(ranks: RankPool) -> None:
    ours = ranks.run(train_small, "optim.clip_norm=1.5", num_ranks=min(2, ranks.size))[0]
    losses, top1s = plain_results()
    np.testing.assert_allclose(ours["losses"], losses, rtol=0, atol=1e-9)
    assert ours["top1s"] == top1s


def test_a_run_on_the_same_number_of_ranks_is_bitwise_reproducible(ranks: RankPool) -> None:
    overrides = ("precision.name=fp32", "batch.global=24", "train.epochs=2")
    for num_ranks in (1, 2, 3):
        if num_ranks <= ranks.size:
            first, again = (ranks.run(train_small, *overrides, num_ranks=num_ranks)[0] for _ in range(2))
            assert first["losses"] == again["losses"] and len(first["losses"]) == 16
            assert all(np.array_equal(first["state"][key], again["state"][key]) for key in first["state"])
