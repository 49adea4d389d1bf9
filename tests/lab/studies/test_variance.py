from pathlib import Path

import pytest
import torch
from megabatch_lab.studies.variance import layer_variance, variance_of

from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.ranks.world import connect, current_rank
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from tests.support.small_runs import small_run


def test_variance_matches_the_output_of_the_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU())
    images = torch.randn(4, 1, 8, 8)
    assert variance_of(model, "0", images.split(3)) == pytest.approx(model[0](images).var().item())
    assert variance_of(model, "1", [images]) == pytest.approx(model(images).var().item())


def test_every_checkpoint_of_a_run_has_a_point(tmp_path: Path) -> None:
    config = small_run(
        f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=1", "checkpoint.keep=100", "train.steps=8"
    )
    with connect(current_rank(), "cpu") as world:
        training = ready_to_train(config, load_data_set(config.data), world)
        train_and_record(config, decide_start(config, "never", world), training)
    layer = next(name for name, module in training.model.module.named_modules() if isinstance(module, torch.nn.Conv2d))
    curve = layer_variance(tmp_path / "run", layer)
    assert [epoch for epoch, _ in curve] == [
        pytest.approx(training.plan.epochs_after(step + 1)) for step in range(training.plan.num_steps)
    ]
    assert len({value for _, value in curve}) > 1
    assert load_config(str(tmp_path / "run/config.toml")).name == config.name
