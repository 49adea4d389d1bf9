"""Commands that do not start ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megabatch.cli.app import add_lab_commands, app, main
from megabatch.cli.show import draw_curve
from megabatch.cli.train import choose_recipe
from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.config.resolve import make_model
from megabatch.data.catalog import infer_shape
from megabatch.errors import UserError
from tests.support.photos import make_folder


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def output(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["lr-range", "--help"],
        ["compare", "--help"],
        ["bench", "train", "--help"],
        ["--version"],
        ["runs", "."],
    ],
)
def test_help_and_the_list_of_runs_do_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from megabatch.cli.app import app\n"
        f"try: app({words!r}, prog_name='megabatch')\n"
        "finally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert ("megabatch" if words[0] != "runs" else "no runs in .") in result.stdout


@pytest.mark.parametrize("words", [["bench", "train", "--rounds", "3"], ["chaos"], ["fuzz", "jpeg", "--inputs", "5"]])
def test_lab_commands_without_the_lab_explain_how_to_install_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.cli.app.find_plugins", lambda group: {})
    installed = typer.Typer()
    installed.command()(version)  # typer runs a single command without its name
    add_lab_commands(installed)
    error = CliRunner().invoke(installed, words).exception
    assert isinstance(error, UserError)
    assert f"megabatch {words[0]} is not in the installed package" in str(error)


def version() -> None:
    pass


def test_help_names_every_command() -> None:
    text = output("--help")
    assert all(command in text for command in ("train", "show", "recipes", "lr-range", "bench"))


def test_recipes_lists_all_recipes_with_their_provenance_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output("recipes")
    assert recipe_names()
    assert all(f"{name}  " in text for name in recipe_names())
    assert "resnet50-imagenet-16k  resnet50, batch 16,384, lars, 51 epochs = 51.0 at 224" in text
    assert "top-1 0.766 on 8 devices in 28.7 minutes; source: libffcv/ffcv-imagenet" in " ".join(text.split())
    assert "resnet50-ffcv-32 resnet50, batch 4,096, sgd, 32 epochs = 17.9 at 224 pixels" in " ".join(text.split())
    assert "interpolated: batch.micro, optim.learning_rate" in text and "extrapolated: " in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("command", [["show"], ["train", "--dry-run"]])
def test_show_and_dry_run_print_the_resolved_run(command: list[str], tmp_path: Path) -> None:
    text = output(*command, "fashion", "optim.weight_decay=0.01", "--ranks", "4")
    assert "weight_decay = 0.01" in text
    assert "global 256 = micro 64 x accumulation 1 x ranks 4" in text
    assert "468 steps = floor(12 epochs x 10,000 samples / 256)" in text
    assert "█" in text and "peak 0.2" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["weights", "0.01", "10", "120,592"] in rows
    assert ["biases", "0", "1", "10"] in rows
    assert ["normalisation", "0", "18", "672"] in rows
    assert "485,096 bytes to all-reduce per step" in text  # 4 x 121,274
    assert (
        "reference  batch 256, learning rate 0.2" in text and "warning    optim.weight_decay=0.01 at batch 256" in text
    )
    assert not list(tmp_path.iterdir())


def test_show_lists_every_parameter_once_with_its_group_decay_and_trust_ratio() -> None:
    config = load_config("fashion", ["optim.name=lars"])
    model = make_model(config, infer_shape(config.data))
    rows = [line.split() for line in output("show", "fashion", "optim.name=lars", "--parameters").splitlines()]
    for name, parameter in model.named_parameters():
        group, decay = ("weights", "0.0005") if parameter.ndim > 1 else ("normalisation", "0")
        group = "biases" if name == "10.bias" else group
        shape = "x".join(map(str, parameter.shape))
        expected = [name, shape, group, decay, "yes" if group == "weights" else "no"]
        assert [row for row in rows if row[:1] == [name]] == [expected]


def test_show_previews_a_cluster_run_on_any_machine() -> None:
    text = output("train", "resnet50-imagenet-64k", "--ranks", "512", "--dry-run")
    assert "global 65,536 = micro 128 x accumulation 1 x ranks 512" in text
    assert "1,739 steps = floor(89 epochs x 1,281,167 samples / 65,536); 19.5 steps per epoch" in text
    assert not any(line.endswith(("yes", "no")) for line in map(str.rstrip, text.splitlines()))
    assert "reference  batch 65,536, learning rate 24.699" in text and "warning" not in text


def test_show_starts_with_the_command_for_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.ranks.devices.choose_device", lambda name: "cpu")
    monkeypatch.setattr("megabatch.cli.show.count_devices", lambda kind: 2)
    text = output("show", "resnet50-imagenet-4k", "--ranks", "8")
    lines = text.strip().splitlines()
    assert lines[0] == "start" and lines[1].startswith("command   megabatch train resnet50-imagenet-4k --ranks 8")
    assert lines[2].startswith("or        torchrun ")
    assert lines[3] == "batch     512 images per step on a GPU: 8 microbatches of 64"
    expected = next(line.split()[1] for line in lines if line.startswith("expected "))
    assert lines[4].startswith(f"memory    {float(expected.replace(',', '')) / 1e3:.4g} GB on a GPU")
    assert lines[5] == "an epoch  1,281,167 images, 312.8 steps"
    assert lines[6].startswith("time      13,136 steps, 53,805,056 images; ") and "unknown" in lines[6]
    assert "warning" not in text  # this machine will not run it


def test_show_warns_of_fp16_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["fashion", "precision.name=fp16", "--ranks", "2"]
    monkeypatch.setattr("megabatch.ranks.devices.choose_device", lambda name: "cpu")
    monkeypatch.setattr("megabatch.cli.show.count_devices", lambda kind: 2)
    assert "warning    precision.name=fp16 computes in fp16" in output("show", *words)
    assert "warning" not in output("show", *words, "precision.name=bf16")
    monkeypatch.setattr("megabatch.cli.show.count_devices", lambda kind: 1)
    assert "warning" not in output("show", *words)
    assert "warning" in output("show", *words, "run.device=cpu")


@pytest.mark.parametrize("source", ["photos", ""])
def test_show_works_without_images_and_explains_how_to_set_them(source: str, tmp_path: Path) -> None:
    words = [f"data.source={source}"] * (source != "photos")
    text = output("show", "photos", *words, "--ranks", "2")
    missing = [line for line in text.splitlines() if line.startswith("missing")]
    assert len(missing) == 1 and "set data.source=FOLDER" in missing[0]
    assert "command   megabatch train photos data.source=FOLDER --ranks 2" in text
    assert "global 64 = micro 32 x accumulation 1 x ranks 2" in text
    assert "█" in text and "epoch 30" in text and "step 1" not in text
    assert "normalisation" in text and "MB  for one microbatch" in text
    assert "30 epochs; steps per epoch = images / 64" in text
    assert not list(tmp_path.iterdir())


def test_show_counts_the_steps_of_an_imagenet_subset_without_its_images() -> None:
    text = output("show", "photos", "data.source=imagenet", "data.validation=0.1", "--ranks", "2")
    assert "missing" not in text and f"an epoch  {1_281_167 - 128_117:,} images" in text


def test_show_needs_no_source_in_a_recipe_file(tmp_path: Path) -> None:
    text = load_config("photos").to_toml().replace('source = "photos"\n', "")
    (tmp_path / "mine.toml").write_text(text)
    shown = output("show", "mine.toml", "train.steps=20")
    assert "missing   data.source is not set; set data.source=FOLDER" in shown and "20 steps" in shown
    with pytest.raises(UserError, match=r"^data.source must be set"):
        output("train", "mine.toml")


def test_a_dry_run_needs_the_images() -> None:
    with pytest.raises(UserError, match=r"^data.source='photos' does not exist"):
        output("train", "photos", "--dry-run")


@pytest.mark.parametrize("command", [["show"], ["train", "--dry-run"]])
def test_a_parent_of_the_data_folder_gives_a_warning(command: list[str], tmp_path: Path) -> None:
    make_folder(tmp_path / "download/photos")
    small = ["data.image_size=16", "batch.global=8", "batch.micro=8"]
    text = output(*command, "photos", "data.source=download", *small)
    (line,) = [line for line in text.splitlines() if line.startswith("warning") and "one class, 'photos'" in line]
    assert line.endswith(f"use {tmp_path}/download/photos")


def test_show_prints_train_steps() -> None:
    text = output("show", "fashion", "train.steps=100", "--ranks", "2")
    assert "100 steps (train.steps) = 2.56 epochs of 10,000 samples; 39.1 steps per epoch" in text
    assert "step 100" in text and "megabatch train fashion train.steps=100" in text


def make_run(folder: str, recipe: str, *overrides: str) -> Path:
    """Write a run's folder without checkpoints."""
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.toml").write_text(load_config(recipe, overrides).to_toml())
    return Path(folder)


SYNTHETIC = ("data.source=synthetic", "data.image_size=16", "data.validation=0")


@pytest.mark.parametrize("words", [[], ["photos"], ["run.threads=1"], ["photos", "run.threads=1"]])
def test_resuming_needs_no_repeated_overrides(words: list[str]) -> None:
    run = make_run("runs/photos-001", "photos", *SYNTHETIC, "seed=7")
    text = output("train", *words, "--resume", str(run), "--ranks", "2", "--dry-run")
    assert 'source = "synthetic"' in text and "seed = 7" in text
    assert ("threads = 1" in text) == ("run.threads=1" in words)


def test_resuming_with_another_recipe_or_a_file_uses_that_recipe() -> None:
    run = make_run("runs/photos-001", "photos", *SYNTHETIC)
    mine = make_run("mine", "photos", *SYNTHETIC, "seed=9") / "config.toml"
    names = recipe_names()
    assert choose_recipe(["smoke"], str(run), names) == ("smoke", [])
    assert choose_recipe([str(mine), "seed=3"], str(run), names) == (str(mine), ["seed=3"])
    assert choose_recipe(["photos", "seed=3"], "auto", names) == ("photos", ["seed=3"])
    checkpoint = run / "checkpoints/step-00000007"
    checkpoint.mkdir(parents=True)
    assert choose_recipe(["photos"], str(checkpoint), names) == (str(run.resolve() / "config.toml"), [])
    with pytest.raises(UserError, match=r"holds a run with .*; give another run.dir"):
        output("train", "smoke", "--resume", str(run), "--ranks", "1")


def test_doctor_accepts_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "megabatch.cli.doctor.start_ranks",
        lambda arguments, num_ranks, recipe: started.append((recipe, num_ranks)),
    )
    run = make_run("runs/photos-001", "photos", *SYNTHETIC)
    output("doctor", str(run), "seed=3", "--ranks", "2")
    assert started == [(load_config("photos", [*SYNTHETIC, "seed=3"]).to_toml(), 2)]
    from_python = make_run("runs/mine-001", "photos", "data.source=python:0123")
    with pytest.raises(UserError, match=r"was started from Python"):
        output("doctor", str(from_python))


def test_strict_refuses_before_launch(tmp_path: Path) -> None:
    """Run in a separate process, to check everything that is printed."""
    command = [sys.executable, "-m", "megabatch", "train", "fashion", "batch.global=4096", "--strict"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout.startswith("starting ") and result.stdout.count("\n") == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("megabatch: --strict: optim.learning_rate=0.2 at batch 4,096: known to converge: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fashion", "optim.lerning_rate=1"], "nearest: optim.learning_rate"),
        (["fashion", "batch.global=320", "--ranks", "2"], "images instead of 64; or 1 rank, or batch.global=256"),
        (["fashion", "--ranks", "0"], "use --ranks 1"),
        (["fashon"], "nearest: fashion"),
        (["fashion", "run.device=gpu"], "run.device='gpu' is not one of auto, cpu, cuda"),
    ],
)
@pytest.mark.parametrize("command", ["train", "show"])
def test_a_wrong_argument_gives_one_line_and_exit_code_2_and_writes_nothing(
    command: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["megabatch", command, *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    output, errors = capfd.readouterr()
    assert output.startswith("starting ") if command == "train" else not output
    assert output.count("\n") <= 1 and len(errors.splitlines()) == 1 and message in errors
    assert not list(tmp_path.iterdir())


def test_a_curve_reaches_its_peak() -> None:
    rows = draw_curve(lambda step: float(step + 1), peak=12.0, num_steps=12, width=6, height=3).splitlines()
    assert [row.partition("│")[2] for row in rows[:3]] == ["    ▄█", "  ▂███", "▂▆████"]
    assert rows[0].startswith("       12 ")
    assert rows[-1].strip() == "first 1, peak 12, last 12"
