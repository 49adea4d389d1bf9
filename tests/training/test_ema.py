"""The moving average of the weights: torch's, evaluated, stored, and refused if it is missing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import megabatch
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.errors import RanksDiffer, UserError
from megabatch.models.weights import read_weights
from megabatch.precision.cast import place_model
from megabatch.precision.policy import PrecisionSettings
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.runs.totals import RunTotals
from megabatch.training.batch_norm import RunningStatistics
from megabatch.training.checkpoint.resume import layout_problems
from megabatch.training.checkpoint.state import training_state
from megabatch.training.drift import compare_ranks
from megabatch.training.ema import WeightAverage
from megabatch.training.evaluate import evaluate
from megabatch.training.loop import train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import begin_small, small_run

EMA = ("train.ema_half_life_epochs=0.4", "train.ema_every_steps=3", "train.epochs=3")  # 18 steps
DECAY = 0.5 ** (3 * 32 / 200 / 0.4)  # three steps of 32 images, of epochs of 200


def train_beside_torch(world: World) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return our averages and torch's after each step.  As arrays, because a tensor takes a descriptor on its way."""
    training = begin_small(world, *EMA)
    torchs = AveragedModel(training.network, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    found = []
    for record in train(training):
        if isinstance(record, StepRecord):
            if record.step % 3 == 0:
                torchs.update_parameters(training.network)
            state = torchs.module.state_dict()
            ours = {name: tensor.cpu().numpy().copy() for name, tensor in training.average.state_dict().items()}
            found.append((ours, {name: state[name].cpu().numpy().copy() for name in ours}))
    return found


def test_it_is_torchs_averaged_model_after_every_step(ranks: RankPool) -> None:
    (found,) = ranks.run(train_beside_torch, num_ranks=1)
    assert len(found) == 18
    for ours, torchs in found:
        assert "0.1.running_var" in ours and not any("num_batches" in name for name in ours)
        for name, average in ours.items():
            np.testing.assert_allclose(average, torchs[name], rtol=1e-15, atol=1e-15)
    assert not np.array_equal(found[-1][0]["0.0.weight"], found[-2][0]["0.0.weight"])


def evaluate_both(world: World) -> list[tuple[Any, ...]]:
    """Return each evaluation, and evaluations of a network with the averages and of the network itself."""
    training = begin_small(world, *EMA, "precision.name=fp32")
    data = load_data_set(small_run().data)
    found = []
    for record in train(training):
        if isinstance(record, EvaluationRecord):
            now = {name: tensor.clone() for name, tensor in training.network.state_dict().items()}
            plain = [
                evaluate(training.network, data.test, training.normalise, 6, 4, world)
                for state in (now | training.average.state_dict(), now)
                if training.network.load_state_dict(state)
            ]
            found.append((record, *plain))
    return found


def test_evaluations_are_of_the_average_and_record_the_raw_accuracy(ranks: RankPool) -> None:
    (found,) = ranks.run(evaluate_both, num_ranks=1)
    assert len(found) == 3
    for record, averaged, raw in found:
        assert (record.top1, record.top5, record.test_loss) == (averaged.top1, averaged.top5, averaged.test_loss)
        assert record.raw_top1 == raw.top1
    assert any(averaged.test_loss != raw.test_loss for _, averaged, raw in found)


class Tied(nn.Module):
    """A network with a tied weight, a frozen weight and a buffer that is not a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.mask


def test_a_16_bit_model_has_the_average_of_its_master_weights() -> None:
    model = Tied()
    masters = place_model(model, PrecisionSettings(name="bf16"), torch.device("cpu"), channels_last=False)
    average = WeightAverage(model, masters, RunningStatistics(model, 1), decay=0.75, every=1)
    expected = torch.zeros(4, 4)
    for done in range(1, 5):
        with torch.no_grad():
            masters.weights["first.weight"].normal_()
        average.update(done)
        expected = masters.weights["first.weight"].detach() * (1 if done == 1 else 0.25) + expected * 0.75
    state = average.state_dict()
    assert {*state} == {"first.weight", "second.weight", "first.bias"} | {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert state["second.weight"] is state["first.weight"] and state["first.weight"].dtype == torch.float32
    torch.testing.assert_close(state["first.weight"], expected)
    assert average.for_forward()["first.weight"].dtype == torch.bfloat16


def missing_state(world: World) -> list[str]:
    entries: dict[str, Any] = {
        name: f"F64 {list(tensor.shape)}"
        for name, tensor in training_state(begin_small(world)).items()
        if tensor.dtype == torch.float64
    }
    problems = layout_problems(entries, begin_small(world, *EMA), RunTotals(global_batch=32, target_top1=None))
    return [problem for problem in problems if "average" in problem]


def test_a_checkpoint_without_the_average_is_refused(ranks: RankPool) -> None:
    (problems,) = ranks.run(missing_state, num_ranks=1)
    assert problems[0] == "average.0.0.weight (F64 [4, 3, 3, 3]) is missing"


def test_an_average_that_would_never_be_updated_is_refused(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"ema_every_steps=19 is more than the 18 steps.*nearest.*=18"):
        from megabatch.preflight.preview import preview

        preview(small_run(*EMA, "train.ema_every_steps=19"), 1)


def spoil_one(world: World) -> str:
    training = begin_small(world, *EMA, "run.compare_every=1")
    if world.rank:
        training.average.tensors["0.1.running_var"][0] += 1
    with pytest.raises(RanksDiffer) as raised:
        compare_ranks(training, 1)
    return str(raised.value)


def test_ranks_with_different_averages_are_found(ranks: RankPool) -> None:
    for message in ranks.run(spoil_one, num_ranks=2):
        assert "average of 0.1.running_var" in message


def test_a_finished_run_and_its_best_checkpoint_store_the_average(tmp_path: Path) -> None:
    images, labels = torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 4
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    settings = [
        *("batch.global=16", "batch.micro=16", "train.epochs=2", f"run.dir={tmp_path / 'run'}"),
        *("train.ema_half_life_epochs=1", "schedule.warmup_epochs=0"),
    ]
    megabatch.fit(network, (images, labels), (images, labels), overrides=settings)
    stored = load_file(tmp_path / "run/model.safetensors")
    checkpoint = load_file(tmp_path / "run/checkpoints/last/state.safetensors")
    assert torch.equal(stored["1.weight"], checkpoint["average.1.weight"])
    assert torch.equal(stored["1.weight"], network.get_parameter("1.weight").detach())
    assert not torch.equal(stored["1.weight"], checkpoint["model.1.weight"])
    for loaded in (
        megabatch.load(tmp_path / "run", checkpoint="last", network=nn.Sequential(nn.Flatten(), nn.Linear(64, 4))),
        megabatch.load(tmp_path / "run", network=nn.Sequential(nn.Flatten(), nn.Linear(64, 4))),
    ):
        assert torch.equal(loaded.network[1].weight, stored["1.weight"])  # type: ignore[index]
    assert torch.equal(read_weights(tmp_path / "run/checkpoints/last")["1.weight"], stored["1.weight"])


def test_it_is_off_by_default() -> None:
    assert load_config("fashion").train.ema_half_life_epochs == 0
