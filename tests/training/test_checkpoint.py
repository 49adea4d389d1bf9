"""A run stopped at any step resumes bitwise identically; damaged checkpoints are reported."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabatch.config.schema import CheckpointSettings
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.optim.optimizers import MakeOptimizer, OptimSettings
from megabatch.ranks.world import World
from megabatch.runs.totals import RunTotals
from megabatch.training.build import Overrides
from megabatch.training.checkpoint.format import (
    DamagedCheckpoint,
    newest_valid,
    read_checkpoint,
    read_description,
    read_state,
)
from megabatch.training.checkpoint.resume import layout_problem
from megabatch.training.checkpoint.save import Checkpoints
from megabatch.training.checkpoint.state import (
    number_to_tensor,
    restore_training_state,
    tensor_to_number,
    training_state,
)
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import require_same_images
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

# 16 steps of six microbatches, of which 5, 5 and 6 have images of 8, 10 and 12 pixels.
SHORT = (
    *("precision.name=fp32", "batch.global=24", "train.epochs=2"),
    *("data.sizes=[[0, 8], [0.3, 10], [0.6, 12]]", "train.ema_half_life_epochs=0.4", "train.ema_every_steps=2"),
)


class Counting(torch.optim.SGD):
    """An optimizer with Python numbers in the state of each weight, on which its step depends."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                state["average"] = 0.9 * state.get("average", 0.1) + 0.1 * float(parameter.grad.norm())
                state["is_odd"], state["nothing"] = state["seen"] % 2 == 1, None
                parameter.data.mul_(1 - 1e-3 * state["average"] / state["seen"] - 1e-3 * state["is_odd"])
        super().step()


def adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.learning_rate, amsgrad=True)


def counting(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return Counting(groups, lr=settings.learning_rate, momentum=0.9)


OWN: dict[str, MakeOptimizer] = {"adamw": adamw, "counting": counting}
BUILT_IN = {"muon and lamb": ("optim.name=muon", "optim.muon.others=lamb")}


def train_with_stops(
    world: World, stops: list[int], folder: str, optimizer: str = ""
) -> tuple[list[float], dict[str, Any]]:
    """Train a short run; at each of `stops`, discard everything except the checkpoint."""
    config = small_run(*SHORT, *BUILT_IN.get(optimizer, ()))
    data = load_data_set(config.data)
    checkpoints = Checkpoints(Path(folder), config.checkpoint, 0)
    losses: list[float] = []
    totals = RunTotals(global_batch=24, target_top1=None)
    for stop in [*stops, 16]:
        training = ready_to_train(config, data, world, Overrides(optimizer=OWN.get(optimizer)))
        if totals.steps:
            state = read_state(checkpoints.folder / "last") if world.rank == 0 else {}
            restore_training_state(training, world.broadcast_tensors(state))
        for record in train(training, first_step=totals.steps):
            totals.add(record, wall_s=0.0)
            if hasattr(record, "loss"):
                losses.append(record.loss)
            if record.step == stop:
                break
        if world.rank == 0:
            checkpoints.save(training, totals)
            checkpoints.drain()
            read_checkpoint(checkpoints.folder / "last", partial(layout_problem, training))
            description = read_description(checkpoints.folder / "last")
            require_same_images(Path(folder), description.data, training)
            with pytest.raises(UserError, match="was trained on different images"):
                require_same_images(Path(folder), "of others", training)
        world.all_reduce(torch.zeros(1, device=world.device))  # the others wait until it is written
    checkpoints.close()
    return losses, {name: tensor.cpu().numpy() for name, tensor in training_state(training).items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_resumed_run_is_bitwise_the_uninterrupted_run(ranks: RankPool, num_ranks: int, tmp_path: Path) -> None:
    if num_ranks > ranks.size:
        pytest.skip(f"needs {num_ranks} ranks")
    whole = ranks.run(train_with_stops, [], str(tmp_path / "whole"), num_ranks=num_ranks)
    pieces = ranks.run(train_with_stops, [1, 2, 3, 7, 15], str(tmp_path / "pieces"), num_ranks=num_ranks)
    for (losses, state), (expected_losses, expected_state) in zip(pieces, whole, strict=True):
        assert losses == expected_losses and len(losses) == 16
        assert state.keys() == expected_state.keys()
        assert all(any(part in name for name in state) for part in ("momentum", "average."))
        for name in state:
            assert np.array_equal(state[name], expected_state[name]), name


@pytest.mark.parametrize(
    ("optimizer", "kept"), [("adamw", ".step"), ("counting", "optimizer_number."), ("muon and lamb", ".exp_avg")]
)
def test_a_run_with_any_torch_optimizer_resumes_bitwise(
    ranks: RankPool, optimizer: str, kept: str, tmp_path: Path
) -> None:
    whole = ranks.run(train_with_stops, [], str(tmp_path / "whole"), optimizer, num_ranks=2)
    pieces = ranks.run(train_with_stops, [1, 6], str(tmp_path / "pieces"), optimizer, num_ranks=2)
    for (losses, state), (expected_losses, expected_state) in zip(pieces, whole, strict=True):
        assert losses == expected_losses and len(losses) == 16
        assert state.keys() == expected_state.keys() and any(kept in name for name in state)
        for name in state:
            assert state[name].dtype == expected_state[name].dtype, name
            assert np.array_equal(state[name], expected_state[name]), name


def test_numbers_in_an_optimizer_state_keep_their_types() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for value in (7, -3, 0.1, math.inf, True, False, None):
        found = tensor_to_number(number_to_tensor(value, "key", optimizer))
        assert found == value and type(found) is type(value)
    with pytest.raises(UserError, match=r"^SGD stores .*'key' .*list; .*only tensors"):
        number_to_tensor([1], "key", optimizer)


def share(world: World) -> tuple[str, dict[str, Any]]:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "e": torch.empty(0)}
    mine = tensors if world.rank == 0 else {}
    text = world.broadcast_text("größe" if world.rank == 0 else "")
    return text, {name: tensor.tolist() for name, tensor in world.broadcast_tensors(mine).items()}


def test_rank_0_shares_text_and_tensors(ranks: RankPool) -> None:
    expected = ("größe", {"a": [[0, 1, 2], [3, 4, 5]], "n": 7, "e": []})
    assert ranks.run(share, num_ranks=min(3, ranks.size)) == [expected] * min(3, ranks.size)


def save_steps(world: World, folder: str, steps: list[int], keep: int, best: int) -> None:
    config = small_run(*SHORT)
    training = ready_to_train(config, load_data_set(config.data), world)
    checkpoints = Checkpoints(Path(folder), CheckpointSettings(keep=keep), 4)
    for step in steps:
        checkpoints.save(training, RunTotals(global_batch=24, target_top1=None, steps=step, best_step=best))
        checkpoints.drain()
    checkpoints.close()


def save_what_is_not_finite(world: World, folder: str) -> None:
    config = small_run(*SHORT)
    training = ready_to_train(config, load_data_set(config.data), world)
    checkpoints = Checkpoints(Path(folder), CheckpointSettings(keep=1), 0)
    checkpoints.save(training, RunTotals(global_batch=24, target_top1=None, steps=1))
    with torch.no_grad():
        next(iter(training.master_weights.weights.values()))[0].fill_(torch.nan)
    checkpoints.save(training, RunTotals(global_batch=24, target_top1=None, steps=2))
    checkpoints.close()


def test_a_state_with_nan_does_not_replace_a_good_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_what_is_not_finite, str(tmp_path), num_ranks=1)
    assert names(tmp_path) == ["last", "step-00000001"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_and_the_best_checkpoints_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, str(tmp_path), [1, 2, 3, 4, 5], 2, 2, num_ranks=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "checkpoints/last").readlink().name == "step-00000005"
    assert (tmp_path / "checkpoints/best").readlink().name == "step-00000002"
    assert read_description(tmp_path / "checkpoints/best").step == 2


def test_the_only_checkpoint_is_never_removed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, str(tmp_path), [1, 2], 1, 0, num_ranks=1)
    assert names(tmp_path) == ["last", "step-00000002"]


def test_resuming_from_an_older_checkpoint_removes_the_newer_ones(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, str(tmp_path), [1, 2, 3, 4], 4, 4, num_ranks=1)
    Checkpoints(tmp_path, CheckpointSettings(), first_step=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_damage_is_reported_and_the_previous_checkpoint_is_used(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, str(tmp_path), [1, 2, 3, 4], 4, 0, num_ranks=1)
    folder = tmp_path / "checkpoints"
    state = folder / "step-00000004/state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    (folder / "step-00000003/state.json").write_text(json.dumps({"step": 3})[:-2])
    shutil.copytree(folder / "step-00000002", folder / ".writing-step-00000005-123")  # left by a kill during the write
    reports: list[str] = []
    assert newest_valid(tmp_path, reports.append) == folder / "step-00000002"
    with pytest.raises(DamagedCheckpoint, match="checksum does not match"):
        read_checkpoint(folder / "step-00000004")
    assert len(reports) == 2
    assert "step-00000004" in reports[0] and "checksum does not match" in reports[0]
    assert "step-00000003" in reports[1] and "cannot be read" in reports[1]
    ranks.run(save_steps, str(tmp_path), [5], 4, 0, num_ranks=1)  # the partial checkpoint does not interfere
    assert not list(folder.glob(".writing-*"))
    assert newest_valid(tmp_path, reports.append) == folder / "step-00000005"


def test_a_checkpoint_of_another_version_is_refused_in_one_line(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, str(tmp_path), [1, 2], 4, 0, num_ranks=1)
    path = tmp_path / "checkpoints/step-00000002/state.json"
    description = json.loads(path.read_text())
    for other in ({"format": 99}, {}):
        path.write_text(json.dumps({key: value for key, value in description.items() if key != "format"} | other))
        with pytest.raises(UserError, match=r"step-00000002 was written by another version of megabatch") as caught:
            newest_valid(tmp_path, print)
        assert "\n" not in str(caught.value)


def test_checkpoints_are_due_as_the_recipe_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [1000.0]
    monkeypatch.setattr("megabatch.training.checkpoint.save.time.monotonic", lambda: clock[0])
    by_steps = Checkpoints(tmp_path, CheckpointSettings(every_steps=5), 0)
    assert [step for step in range(1, 16) if by_steps.is_due(step)] == [5, 10, 15]
    by_minutes = Checkpoints(tmp_path, CheckpointSettings(every_minutes=2), 0)
    by_cost = Checkpoints(tmp_path, CheckpointSettings(), 0)
    by_cost.saving_took_s = 0.5
    for clock[0], minutes_due, cost_due in ((1049.0, False, False), (1051.0, False, True), (1121.0, True, True)):
        assert (by_minutes.is_due(1), by_cost.is_due(1)) == (minutes_due, cost_due)
