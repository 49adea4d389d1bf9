"""The simulator's job of a recipe matches the training run."""

from pathlib import Path

import pytest

from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model, plan_run
from megabatch.data.catalog import infer_shape
from megabatch.precision.policy import PRECISIONS
from megabatch.preflight.preview import job_of_recipe
from megabatch.simulate.compute import GRADIENTS
from megabatch.simulate.load import load_cluster


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("fashion", []),
        ("fashion", ["train.steps=17", "train.evaluate_every=0"]),
        ("resnet50-imagenet-64k", []),
        ("smoke", ["train.epochs=0.3"]),
    ],
)
def test_job_has_the_steps_evaluations_and_parameters_of_the_run(recipe: str, overrides: list[str]) -> None:
    config = load_config(recipe, overrides)
    shape = infer_shape(config.data)
    plan = plan_run(config, shape, num_ranks=1)
    job, has_images = job_of_recipe(config)
    length = job.length(1)
    assert has_images and job.share(1) == (plan.global_batch, plan.accumulation)
    assert length.num_steps == plan.num_steps and length.test_images == shape.num_test
    assert length.num_evaluations == sum(plan.should_evaluate_after(step + 1) for step in range(plan.num_steps))
    model = make_model(config, shape)
    assert job.workload.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_an_evaluation_computes_each_image_for_every_view_and_average() -> None:
    passes = {
        "train.evaluate_every=1": 1,
        "data.test_views=mirror": 2,
        "train.ema_half_life_epochs=1": 2,
        'data={source="fashion-mnist-10k", image_size=28, test_views="mirror-shift"}': 6,
    }
    for override, count in passes.items():
        job, _ = job_of_recipe(load_config("fashion", [override]))
        assert job.num_test == count * 2_000
    ffcv, mild = (job_of_recipe(load_config(f"resnet50-{name}"))[0] for name in ("ffcv-16", "mosaic-mild"))
    assert ffcv.num_test == mild.num_test == 100_000


def test_communication_settings_come_from_the_recipe() -> None:
    job, _ = job_of_recipe(load_config("fashion", ["comm.dtype=bf16", "comm.algorithm=torus", "comm.bucket_mb=3"]))
    assert job.all_reduce == ("bf16", "torus", "auto", 3.0)
    job, _ = job_of_recipe(load_config("fashion"))
    assert job.all_reduce == ("same", "auto", "auto", None)


def test_without_images_the_size_of_imagenet_is_assumed() -> None:
    config = load_config("photos", ["data.source=nowhere", "data.image_size=32", "model.name=tiny_cnn"])
    job, has_images = job_of_recipe(config)
    assert not has_images and (job.num_train, job.num_test) == (1_281_167, 50_000)
    assert job.scenario(load_cluster("p40-roce100"), 2).length is not None


def test_stored_workload_is_used_only_for_the_same_network() -> None:
    stored, _ = job_of_recipe(load_config("resnet50-imagenet-256"))
    other, _ = job_of_recipe(load_config("resnet50-imagenet-256", ["data.image_size=160"]))
    assert stored.workload.image_size == 224 and other.workload.image_size == 160
    assert other.workload.forward_flops < 0.6 * stored.workload.forward_flops
    frozen, _ = job_of_recipe(load_config("resnet50-imagenet-256", ["model.freeze=['layer1']"]))
    assert frozen.workload.num_parameters < stored.workload.num_parameters


def test_the_simulator_knows_the_gradients_of_every_precision() -> None:
    formats = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
    assert {name: f"torch.{formats[dtype]}" for name, dtype in GRADIENTS.items()} == {
        name: str(precision.model) for name, precision in PRECISIONS.items()
    }
