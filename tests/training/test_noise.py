"""The noise scale that a run measures, compared with per-sample gradients, and on any number of ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from megabatch.data.catalog import load_data_set
from megabatch.models.loss import summed_loss
from megabatch.ranks.world import World
from megabatch.runs.noise import ONE_MICROBATCH
from megabatch.runs.records import NoiseRecord, StepRecord
from megabatch.training.build import Overrides
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import begin_small, small_run

SHORT = ("train.steps=4", "train.noise_every=2", "train.evaluate_every=0", "schedule.warmup_epochs=0")


def measure(world: World, *overrides: str) -> tuple[list[NoiseRecord | None], dict[str, Any]]:
    """Return the noise of each step, and the weights."""
    training = begin_small(world, *SHORT, *overrides)
    noise = [record.noise for record in train(training) if isinstance(record, StepRecord)]
    return noise, {name: value.numpy() for name, value in training.master_weights.state_dict().items()}


def by_samples(world: World, *overrides: str) -> tuple[NoiseRecord, NoiseRecord]:
    """Return the noise of the second step, from per-sample gradients and as the run measures it."""
    config = small_run(*SHORT, *overrides)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    data = load_data_set(config.data)
    training = ready_to_train(config, data, world, Overrides(network=network))
    records = train(training)
    next(records)
    weights = {name: value.detach().clone() for name, value in training.network.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = functional_call(training.network, weights, (image[None],))
        return summed_loss(config.loss, logits, label[None])

    plan, parts = training.plan, []
    for index in range(config.batch.num_microbatches):
        images, labels = training.images.microbatch(1, index)
        found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, training.normalise(images), labels)
        parts.append(torch.cat([value.flatten(1) for value in found.values()], dim=1).sum(0) / plan.global_batch)
    num, micro = len(parts), plan.microbatch
    whole = torch.stack(parts).sum(0)
    trace = micro * float((num * torch.stack(parts) - whole).square().sum()) / (num - 1)  # covariance of microbatches
    expected = NoiseRecord(signal=float(whole.square().sum()) - trace / (micro * num), trace=trace)
    measured = next(record for record in records if isinstance(record, StepRecord)).noise
    assert measured
    return expected, measured


@pytest.mark.parametrize("microbatch", [1, 8])
def test_noise_is_that_of_per_sample_gradients(ranks: RankPool, microbatch: int) -> None:
    expected, measured = ranks.run(by_samples, f"batch.micro={microbatch}", "optim.clip_norm=0.01", num_ranks=1)[0]
    assert (measured.signal, measured.trace) == pytest.approx((expected.signal, expected.trace), rel=1e-9)
    assert measured.trace > 0


def test_noise_does_not_depend_on_the_number_of_ranks(ranks: RankPool) -> None:
    found = [ranks.run(measure, num_ranks=number) for number in (1, 2, 4)]
    expected, _ = found[0][0]
    assert [record is None for record in expected] == [True, False, True, False]
    for result in (noise for results in found for noise, _ in results):
        for one, other in zip(expected[1::2], result[1::2], strict=True):
            assert (one.signal, one.trace) == pytest.approx((other.signal, other.trace), rel=1e-9)


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision.name=fp32", "optim.name=lars"),
        ("precision.name=fp16", "comm.dtype=fp16"),
        ("precision.name=bf16", "optim.clip_norm=0.1"),
    ],
)
def test_measuring_changes_no_bit_of_the_weights(ranks: RankPool, overrides: tuple[str, ...]) -> None:
    (_, measured), (_, without) = (
        ranks.run(measure, *overrides, f"train.noise_every={every}", num_ranks=2)[1] for every in (1, 0)
    )
    assert measured.keys() == without.keys()
    assert all((measured[name] == without[name]).all() for name in measured)


def test_loss_scale_changes_the_noise_only_by_rounding(ranks: RankPool) -> None:
    def noise(*overrides: str) -> tuple[float | None, float | None]:
        record = ranks.run(measure, *overrides, num_ranks=2)[0][0][1]
        return record.signal, record.trace

    # Powers of two change only gradients that underflow.  How far fp16 is from fp64 depends on the CPU's convolutions.
    exact, half = noise("precision.name=fp64"), noise("precision.name=fp16", "precision.loss_scale=4096")
    other_scale, amp = noise("precision.name=fp16", "precision.loss_scale=1024"), noise("precision.name=amp")
    assert half == pytest.approx(other_scale, rel=1e-3)
    assert exact[1] is not None
    for found in (half, amp):
        assert found == pytest.approx(exact, abs=0.1 * exact[1])


def test_one_microbatch_has_no_noise_scale(ranks: RankPool) -> None:
    noise, _ = ranks.run(measure, "batch.micro=32", num_ranks=1)[0]
    assert noise[1] == NoiseRecord(reason=ONE_MICROBATCH)


def test_run_shorter_than_the_interval_has_the_reason(ranks: RankPool) -> None:
    noise, _ = ranks.run(measure, "train.noise_every=20", num_ranks=1)[0]
    assert noise[:3] == [None, None, None]
    assert noise[3] and "4 steps; make train.noise_every smaller" in (noise[3].reason or "")
