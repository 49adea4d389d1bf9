"""model.compile: the same run up to rounding, compiled once, with gradients all-reduced by our hook."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megabatch
from megabatch.config.resolve import decisive_settings
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.ranks.world import World, connect, current_rank
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.training.checkpoint.format import describe_arithmetic
from megabatch.training.checkpoint.state import training_state
from megabatch.training.loop import train
from megabatch.training.parts import Training
from megabatch.training.prepare import prepare, ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

pytestmark = pytest.mark.lab  # compiles for a minute

NETWORK = f"model.name={__name__}:network"
# Six microbatches per step, so that a momentum of BatchNorm takes six values on one rank, and three on two.
SHORT = ["batch.global=12", "batch.micro=2", "train.epochs=1", "schedule.warmup_epochs=0", "precision.name=fp32"]
SHORT += ["data.synthetic.train=48"]
COMPILED = "model.compile=true"


def network(num_classes: int, in_channels: int) -> nn.Module:
    """Return a small network, which compiles quickly."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, num_classes)
    )


def network_of_plain_averages(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network whose last layer has more bytes than torch allows in one of DDP's graphs."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8, momentum=None),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )


def run_to_the_end(training: Training) -> dict[str, Any]:
    records = list(train(training))
    return {
        "losses": [record.loss for record in records if isinstance(record, StepRecord)],
        "tests": [record.test_loss for record in records if isinstance(record, EvaluationRecord)],
        "state": {name: tensor.numpy().copy() for name, tensor in training_state(training).items()},
        "steps_of_the_hook": training.gradients.progress.step,
    }


def train_short(world: World, *overrides: str) -> dict[str, Any]:
    config = small_run(NETWORK, "model.options={}", *SHORT, *overrides)
    training = ready_to_train(config, load_data_set(config.data), world)
    with torch.compiler.set_stance("fail_on_recompile"):  # all steps must use the code that the warm-up pass compiled
        result = run_to_the_end(training)
    return result | {"compiled_by": describe_arithmetic(training)}


def train_alone(*overrides: str) -> dict[str, Any]:
    with connect(current_rank(), "cpu") as world:
        return train_short(world, *overrides)


@pytest.mark.timeout(300)  # compiling takes 15 s on an idle core, and much longer on a busy machine
def test_a_compiled_run_matches_to_rounding_on_one_and_two_ranks(ranks: RankPool) -> None:
    plain = train_alone()
    assert len(plain["losses"]) == 4 and len(plain["tests"]) == 1 and "compiled" not in plain["compiled_by"]
    alone = [train_alone(COMPILED)]  # two ranks find the code compiled by one rank in torch's cache
    measured = train_alone(COMPILED, "train.noise_every=2")
    assert all(np.array_equal(measured["state"][name], array) for name, array in alone[0]["state"].items())
    for results in (alone, ranks.run(train_short, COMPILED, num_ranks=2, timeout_s=200)):
        for result in results:
            np.testing.assert_allclose(result["losses"], plain["losses"], rtol=0, atol=1e-5)
            np.testing.assert_allclose(result["tests"], plain["tests"], rtol=0, atol=1e-5)
            assert list(result["state"]) == list(plain["state"])  # no name has _orig_mod in it
            assert result["steps_of_the_hook"] == 4 and result["compiled_by"].endswith(", compiled")
            for name, array in plain["state"].items():
                np.testing.assert_allclose(result["state"][name], array, rtol=1e-4, atol=1e-5, err_msg=name)
                assert np.array_equal(result["state"][name], results[0]["state"][name])


def noting_graphs(graphs: list[torch.fx.GraphModule], graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler backend that records the graphs of torch.compile without compiling them."""
    graphs.append(graph)
    return graph.forward


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_a_network_is_compiled_once_in_graphs_as_large_as_buckets(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []
    backend = partial(noting_graphs, graphs)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    own = [f"model.name={__name__}:network_of_plain_averages", "model.options={}", *SHORT]
    results = []
    for more in ([], [COMPILED, "comm.bucket_mb=1"]):
        config = small_run(*own, f"precision.name={precision}", "train.evaluate_every=1", "train.epochs=1.5", *more)
        with prepare(config, current_rank()) as ready:
            results.append(run_to_the_end(ready.training))
    assert len(graphs) == 2  # of one network: torch did not recompile for another momentum or for evaluation
    plain, compiled = results
    np.testing.assert_allclose(compiled["losses"], plain["losses"], rtol=1e-5)
    assert compiled["tests"] == pytest.approx(plain["tests"], rel=1e-5)
    for name, array in plain["state"].items():
        np.testing.assert_allclose(compiled["state"][name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_fit_changes_only_the_weights_of_the_callers_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=partial(noting_graphs, graphs)))
    labels = torch.arange(48) % 6
    images = (labels[:, None, None, None] * 40).expand(48, 3, 12, 12).to(torch.uint8)
    weights = []
    for more in ([], [COMPILED]):
        torch.manual_seed(0)
        own = network(num_classes=6, in_channels=3)
        settings = ["train.epochs=1", "batch.global=12", "batch.micro=2", "run.threads=1", *more]
        settings += ["schedule.warmup_epochs=0.1", f"run.dir={tmp_path / str(len(more))}"]
        megabatch.fit(own, (images, labels), (images, labels), overrides=settings)
        assert own.get_submodule("1").momentum == 0.1 and "forward" not in vars(own) and not own._forward_hooks
        weights.append(own.state_dict())
    assert len(graphs) == 1
    saved = load_file(tmp_path / "1/model.safetensors")
    for name, tensor in weights[1].items():
        assert torch.equal(saved[name], tensor)
        torch.testing.assert_close(tensor, weights[0][name], rtol=1e-4, atol=1e-5)


def test_a_run_can_be_resumed_compiled_or_not() -> None:
    plain, compiled = (decisive_settings(small_run(NETWORK, "model.options={}", *more)) for more in ([], [COMPILED]))
    assert plain == compiled


def refuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise NotImplementedError("no such operation\nand more")


@pytest.mark.parametrize("name", ["small_cnn", f"{__name__}:network"])
def test_a_compile_error_is_reported_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuse))
    config = small_run(f"model.name={name}", "model.options={}", *SHORT, COMPILED)
    expected = r"^model.compile=true: .* \(NotImplementedError: no such operation\); omit model.compile$"
    with pytest.raises(UserError, match=expected) as refusal, prepare(config, current_rank()):
        pass
    assert "\n" not in str(refusal.value)


def test_a_missing_compiler_error_names_a_package_to_install() -> None:
    config = small_run(NETWORK, "model.options={}", *SHORT, COMPILED, "batch.micro=3")  # not in any cache
    missing = {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
    expected = r"^model.compile=true: .* \(.*no-such-compiler.*\); install a C\+\+ compiler such as g\+\+"
    with (
        torch._inductor.config.patch(missing),
        pytest.raises(UserError, match=expected) as refusal,
        prepare(config, current_rank()),
    ):
        pass
    assert "\n" not in str(refusal.value)
