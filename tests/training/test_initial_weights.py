"""A run with initial weights, frozen modules and a separate head learning rate is the same on all ranks."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import megabatch
from megabatch.config.resolve import make_model, plan_groups
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training.loop import train
from megabatch.training.prepare import prepare, ready_to_train
from megabatch.training.run import train_and_record
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

SHORT = (
    "precision.name=fp32",
    "batch.global=24",
    "train.epochs=1",
    "schedule.warmup_epochs=0.25",
)  # 8 steps of six microbatches
FROZEN = ("0.", "2.", "3.")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the weights of a network for 9 classes, with BatchNorm statistics that are not the initial ones."""
    config = small_run("seed=5", "data.synthetic.classes=9")
    state = make_model(config, load_data_set(config.data).shape).state_dict()
    for name in state:
        if name.endswith("running_var"):
            state[name] = torch.rand_like(state[name]) + 0.5
        elif name.endswith("running_mean"):
            state[name] = 0.1 * torch.randn_like(state[name])
    path = tmp_path_factory.mktemp("weights") / "nine.safetensors"
    save_file(state, path)
    return path


def train_short(world: World, *overrides: str) -> dict[str, Any]:
    """Train a short run; return its losses, and the final state as fp32 arrays."""
    config = small_run(*SHORT, *overrides)
    training = ready_to_train(config, load_data_set(config.data), world)
    losses = [record.loss for record in train(training) if isinstance(record, StepRecord)]
    state = training.master_weights.state_dict()
    return {"losses": losses, "state": {name: tensor.cpu().numpy() for name, tensor in state.items()}}


def differing(runs: list[dict[str, Any]]) -> list[str]:
    first = runs[0]["state"]
    return [name for run in runs for name in first if not np.array_equal(run["state"][name], first[name])]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_frozen_modules_keep_the_files_weights_and_ranks_are_identical(
    ranks: RankPool, weights: Path, precision: str
) -> None:
    """Use three ranks, because the mean of three equal numbers can differ from them, and two evaluations, which
    change modes.
    """
    overrides = (f"precision.name={precision}", f"model.weights={weights}", 'model.freeze=["0", "2", "3"]')
    runs = ranks.run(train_short, *overrides, "train.epochs=2", num_ranks=min(3, ranks.size))
    assert not differing(runs)
    loaded = load_file(weights)
    for name, value in runs[0]["state"].items():
        assert np.array_equal(value, loaded[name]) == name.startswith(FROZEN), name


def test_a_head_learning_rate_equal_to_the_others_changes_nothing(ranks: RankPool) -> None:
    (usual,) = ranks.run(train_short, num_ranks=1)
    (apart,) = ranks.run(train_short, "optim.head_learning_rate=0.05", num_ranks=1)
    (other,) = ranks.run(train_short, "optim.head_learning_rate=0.2", num_ranks=1)
    assert usual["losses"] == apart["losses"] != other["losses"]
    assert not differing([usual, apart])


def test_only_the_head_learning_rate_matters_if_the_rest_is_frozen(ranks: RankPool) -> None:
    frozen = ('model.freeze=["0", "2", "3", "4"]',)
    (usual,) = ranks.run(train_short, *frozen, "optim.learning_rate=0.125", num_ranks=1)
    (apart,) = ranks.run(train_short, *frozen, "optim.learning_rate=0.5", "optim.head_learning_rate=0.125", num_ranks=1)
    assert usual["losses"] == apart["losses"]
    assert not differing([usual, apart])


def start_from(world: World, weights: str) -> str:
    with pytest.raises(UserError) as error:
        train_short(world, f"model.weights={weights}")
    return str(error.value)


def test_invalid_weights_are_reported_by_all_ranks(ranks: RankPool) -> None:
    said = ranks.run(start_from, "none.pth", num_ranks=2)
    assert said[0] == said[1] and said[0].startswith("model.weights='none.pth': none.pth does not exist")


def begin_or_resume(world: World, folder: str, weights: str, stop_after: int) -> tuple[str, tuple[str, ...], int]:
    config = small_run(*SHORT, f"run.dir={folder}", f"model.weights={weights}")
    info = RankInfo(world.rank, world.num_ranks, world.rank, world.num_ranks)
    steps = itertools.count(1)
    with prepare(config, info, resume="auto", stop_requested=lambda: next(steps) >= stop_after) as ready:
        summary = train_and_record(ready.config, ready.start, ready.training)
    return summary.status, ready.training.initial_weights, summary.steps


def test_a_resumed_run_does_not_read_the_weights_again(ranks: RankPool, weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    said = ("from copy.safetensors: 12 of 14 tensors", "new head: 8.weight is [9, 24] in the file and [6, 24] in the ")
    for status, lines, steps in ranks.run(begin_or_resume, str(tmp_path / "run"), str(copy), 3, num_ranks=2):
        assert (status, steps) == ("stopped", 3)
        assert lines[0] == said[0] and lines[1].startswith(said[1])
    copy.unlink()
    for answer in ranks.run(begin_or_resume, str(tmp_path / "run"), str(copy), 99, num_ranks=2):
        assert answer == ("finished", (), 8)


def test_a_frozen_head_refuses_a_learning_rate() -> None:
    config = small_run('model.freeze=["8"]', "optim.head_learning_rate=0.2")
    model = make_model(config, load_data_set(config.data).shape)
    with pytest.raises(UserError, match=r"optim.head_learning_rate=0.2: the last layer, 8, is frozen"):
        plan_groups(config, model)


def fit_own(world: World, weights: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # networks differ: rank 0's head is used
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    labels = torch.arange(64) % 4
    images = (labels[:, None, None, None] * 60).expand(64, 1, 8, 8).to(torch.uint8)
    overrides = [f"model.weights={weights}", 'model.freeze=["1", "2"]', f"run.dir={folder}", "batch.global=16"]
    megabatch.fit(
        network,
        (images, labels),
        (images, labels),
        overrides=[*overrides, "batch.micro=8", "train.epochs=1", "schedule.warmup_epochs=0"],
    )
    assert all(parameter.requires_grad for parameter in network.parameters())  # the caller's network is not frozen
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def test_a_network_from_python_accepts_initial_weights(ranks: RankPool, tmp_path: Path) -> None:
    loaded = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 9)).state_dict()
    torch.save(loaded, tmp_path / "own.pth")
    states = ranks.run(fit_own, str(tmp_path / "own.pth"), str(tmp_path / "run"), num_ranks=2)
    assert not differing([{"state": state} for state in states])
    for name in ("1.weight", "1.bias", "2.weight", "2.running_mean", "2.running_var"):
        assert np.array_equal(states[0][name], loaded[name]), name
