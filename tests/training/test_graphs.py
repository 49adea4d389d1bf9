"""model.cuda_graphs: the same run to rounding.  tests/rehearsal/ runs the graphs themselves."""

from typing import Any

import pytest
from torch import nn

from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.ranks.world import World, connect, current_rank
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.training.checkpoint.format import describe_arithmetic
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool

SMALL = [
    "data.synthetic.train=48",
    "data.synthetic.test=10",
    "batch.global=12",
    "train.epochs=2",
    "model.name=tiny_cnn",
]
SMALL += ["precision.name=fp64", "data.image_size=12", "model.options.width=4", "run.threads=1"]
GRAPHS = "model.cuda_graphs=true"


def train_small(world: World, *overrides: str) -> dict[str, Any]:
    config = load_config("smoke", [*SMALL, *overrides])
    training = ready_to_train(config, load_data_set(config.data), world)
    records = list(train(training))
    return {
        "losses": [record.loss for record in records if isinstance(record, StepRecord)],
        "top1s": [record.top1 for record in records if isinstance(record, StepRecord)],
        "tests": [record.test_loss for record in records if isinstance(record, EvaluationRecord)],
        "computed_by": describe_arithmetic(training),
    }


def train_alone(*overrides: str) -> dict[str, Any]:
    with connect(current_rank(), "cpu") as world:
        return train_small(world, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [("data.augment={mixup=0.4, cutmix=1.0}",), ("precision.name=amp-bf16", "loss.label_smoothing=0.1")],
    ids=["fp64", "amp"],
)
def test_run_with_graphs_is_the_same_run_to_rounding(overrides: tuple[str, ...]) -> None:
    """Six microbatches per step, five of them in a graph; BatchNorm's statistics are in the test losses."""
    eager, graphed = (train_alone("batch.micro=2", *overrides, *added) for added in ((), (GRAPHS,)))
    tolerance = 2e-2 if "precision.name=amp-bf16" in overrides else 1e-9
    assert graphed["losses"] == pytest.approx(eager["losses"], rel=tolerance)
    assert graphed["tests"] == pytest.approx(eager["tests"], rel=tolerance)
    assert graphed["top1s"] == eager["top1s"] and len(set(eager["top1s"])) > 1
    assert graphed["computed_by"] == f"{eager['computed_by']}, in graphs"


def test_ranks_with_graphs_train_the_run_of_one_rank(ranks: RankPool) -> None:
    settings = ("batch.micro=2", "train.epochs=1", "schedule.warmup_epochs=0")  # few steps: rounding errors grow
    expected = train_alone(*settings)
    for found in ranks.run(train_small, *settings, GRAPHS, num_ranks=2):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["tests"] == pytest.approx(expected["tests"], rel=1e-9)


def test_setting_without_effect_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    eager, graphed = (train_alone("batch.micro=12", *added) for added in ((), (GRAPHS,)))
    assert graphed == eager
    assert "model.cuda_graphs=true has no effect" in capsys.readouterr().err


def test_graphs_of_a_compiled_network_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.compile.*model\.cuda_graphs.*omit one"):
        load_config("smoke", [GRAPHS, "model.compile=true"])


def tied(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network whose first layer is not trained and in which two layers share their weights."""
    first, middle, last = nn.Linear(in_channels * 144, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = middle.weight
    first.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), middle, nn.ReLU(), last, nn.ReLU(), nn.Linear(8, num_classes))


def test_frozen_and_tied_weights_train_as_without_graphs() -> None:
    network = (f"model.name={__name__}:tied", "model.options={}", "batch.micro=2")
    assert train_alone(*network, GRAPHS)["losses"] == pytest.approx(train_alone(*network)["losses"], rel=1e-9)
