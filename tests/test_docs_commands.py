"""Commands in README and docs: options, recipes and settings exist, and quick commands run.

The reader's folder has the files that the pages mention: photos, a recipe, runs.  Commands run in this process,
because starting torch takes seconds.  `train` runs with --dry-run, which resolves and prints everything but does not
train.
"""

import doctest
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import typer
from PIL import Image
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import megabatch
from megabatch.cli.app import app
from megabatch.cli.overrides import split_arguments_or_run
from megabatch.comm.api import attach, distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError
from megabatch.experiments.design import read_any_design
from megabatch.inference.classifier import Classifier, load
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lars import LARS
from megabatch.ranks.world import connect, current_rank
from megabatch.runs.records import EvaluationRecord, StepRecord
from megabatch.training.fit import fit
from tests.support.pages import ROOT, Command, blocks, commands, inline_commands, make_targets, name_of, pages
from tests.support.photos import make_folder
from tests.support.use import train_photos

pytestmark = pytest.mark.ranks  # starts processes

# Commands that are run.
QUICK = {
    "check",
    "compare",
    "eval",
    "export",
    "pack",
    "predict",
    "recipes",
    "report",
    "runs",
    "settings",
    "show",
    "simulate",
}
QUICK |= {"train"}
# Commands that are checked (options, recipe, settings) but not run: the reason, and the test that runs them.
NOT_RUN = {
    "bench": "measures for minutes; tests/lab/bench",
    "chaos": "minutes; tests/lab/chaos/test_command.py",
    "doctor": "measures for half a minute; tests/training/test_doctor.py",
    "fuzz": "minutes; tests/lab/fuzz/test_command.py",
    "lr-range": "12 epochs eight times; tests/experiments/test_lr_range.py",
    "plan": "starts ranks and measures links; tests/comm/test_tune.py",
    "selftest": "minutes, on all devices; tests/rehearsal/test_selftest.py",
    "profile": "measures; tests/training/test_profile.py, tests/cli/test_profile.py",
    "study": "hours; tests/experiments",
}
# The same for lines that contain these parts.
NOT_RUN_HERE = {
    "/data/": "ImageNet is not installed",
    "--open": "opens a browser; tests/report/test_command.py",
    "torchvision.models:resnet18": "torchvision may not be installed; tests/models/test_torchvision.py",
    "timm:create_model": "timm may not be installed; tests/models/test_torchvision.py",
    "runs/photos-003": "the commands of docs/use.md again, and exporting takes seconds",
}
# Replacements of placeholders, and of values that take too long.
REPLACED = {
    "RUN": "runs/photos-001",
    "FOLDER": "my_photos",
    "RECIPE": "fashion",
    "runs/fashion-001": "runs/photos-001",
    "runs/fashion-002": "runs/photos-002",
    "runs/fashion-*": "runs/photos-001",  # a shell would expand this to both runs
    "step-00000390": "last",
    "8..2048": "8",
}
# Replacements of placeholders in options of torchrun.
TORCHRUN = {
    "--node-rank=I": "--node-rank=1",
    "--nnodes=NODES": "--nnodes=2",
    "--nproc-per-node=GPUS": "--nproc-per-node=8",
}
# Python in pages that another test runs.
PYTHON_ELSEWHERE = {
    "docs/attach.md": "tests/comm/test_attach_scripts.py",
    "docs/clusters.md": "tests/cli/test_joined_ranks.py",  # needs Ray
}


def fill_placeholders(words: tuple[str, ...]) -> list[str]:
    return [REPLACED.get(word, word) for word in words]


ALL = [command for page in pages() for command in commands(page)]
FOUND = list({(command.prefix, *fill_placeholders(command.words)): command for command in reversed(ALL)}.values())


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    make_folder(folder / "my_photos", per_class=6)
    rows = [f"{path.relative_to(folder / 'my_photos')},{path.parent.name}" for path in folder.glob("my_photos/*/*.jpg")]
    (folder / "my_photos/labels.csv").write_text("\n".join(rows))
    (folder / "my_photos/several.csv").write_text("\n".join(f"{row};new" for row in rows))
    for name in ("mine", "photos_500px"):
        (folder / name).symlink_to("my_photos")
    for name in ("picture.jpg", "a.jpg"):
        shutil.copy(folder / "my_photos/bag/000.jpg", folder / name)
    Image.open(folder / "a.jpg").save(folder / "b.png")
    (folder / "my.toml").write_text(load_config("smoke", ["batch.global=4096", "data.synthetic.train=40960"]).to_toml())
    with pytest.MonkeyPatch.context() as inside:
        inside.chdir(folder)
        torch.set_num_threads(1)
        for seed in (1, 2):
            train_photos(Path(f"runs/photos-00{seed}"), "data.source=my_photos", "train.epochs=2", f"seed={seed}")
    return folder


@pytest.fixture
def inside(readers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(readers_folder)
    return readers_folder


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the command and its arguments, as the command line parses them; a wrong option raises."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("megabatch", list(words), resilient_parsing=False)
    path = []
    while hasattr(group, "commands"):
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        path.append(name)
        context = group.make_context(name, rest, parent=context)
    return path[0], context.params


def check_torchrun(prefix: str) -> None:
    """Check that torchrun has the options."""
    words = [TORCHRUN.get(word, word) for word in shlex.split(prefix)[1:] if word != "..."]
    parsed, unknown = get_args_parser().parse_known_args([*words, "megabatch"])
    assert not unknown and parsed.module and parsed.training_script == "megabatch"


def test_commands_are_found() -> None:
    assert len(FOUND) > 40
    assert {command.page for command in FOUND} > {"README.md", "docs/use.md", "docs/clusters.md"}


def test_the_tests_named_for_other_commands_exist() -> None:
    named = re.findall(r"tests/[\w/.]+", " ".join([*NOT_RUN.values(), *NOT_RUN_HERE.values()]))
    assert len(named) > 8 and all((ROOT / path).exists() for path in named)


@pytest.mark.parametrize("command", FOUND, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_a_command_in_a_page_works(command: Command, inside: Path) -> None:
    words = fill_placeholders(command.words)
    name, given = parse(words)
    assert name in QUICK | set(NOT_RUN), f"new command {name}: add it to QUICK or NOT_RUN in {Path(__file__).name}"
    if command.prefix.startswith("torchrun"):
        check_torchrun(command.prefix)
    if "given" in given and name != "simulate":
        arguments = given["given"] or []
        settings = [word for word in arguments if "=" in word]
        # A study takes several recipes.
        several = [[word, *settings] for word in arguments if "=" not in word] if name == "study" else [arguments]
        for words_of_one in several:
            recipe, overrides = split_arguments_or_run(words_of_one)
            if command.message:
                overrides = []  # they are invalid: the message is checked below
            load_config(recipe, overrides, needs_source=False)
    if name in NOT_RUN or any(part in command.line for part in NOT_RUN_HERE):
        return
    if name == "train":
        words = [*words, "--dry-run"]
    piped = command.prefix.removesuffix("|") if command.prefix.endswith("|") else ""
    stdin = subprocess.run(["bash", "-c", piped], capture_output=True, check=True).stdout if piped else None
    result = CliRunner().invoke(app, words, input=stdin)
    if command.message:
        assert command.message in f"{result.exception}\n{result.stderr}"
    else:
        assert result.exit_code == 0, f"{result.exception!r} {result.output}"
    if command.output:
        assert result.stdout.strip()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_options_of_commands_in_sentences_exist(page: Path) -> None:
    for text in inline_commands(page):
        words = [word.strip("[],.") for word in text.split()[1:]]
        group: Any = typer.main.get_command(app)
        for word in words:
            if not hasattr(group, "commands"):
                break
            assert word in group.commands, f"{text}: there is no command {word}"
            group = group.commands[word]
        options = {option for parameter in group.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in words:
            assert not word.startswith("--") or word.partition("=")[0] in {*options, "--help"}, f"{text}: {word}"
        if words[0] in ("train", "show") and len(words) > 1 and re.fullmatch(r"[a-z][a-z0-9-]+", words[1]):
            assert words[1] in recipe_names(), text


def test_make_targets_in_pages_exist() -> None:
    targets = make_targets()
    for page in pages():
        named = {word for text in blocks(page, "") for word in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)}
        assert named <= targets, name_of(page)


@pytest.mark.parametrize("page", [page for page in pages() if list(blocks(page, "python"))], ids=name_of)
def test_python_in_a_page_runs(page: Path, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if elsewhere := PYTHON_ELSEWHERE.get(name_of(page)):
        assert page.name in (ROOT / elsewhere).read_text()
        return
    # One core: with busy ranks on the same cores, two threads take ten times as long.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    for text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), {"model": torch.nn.Linear(2, 2)})


PUBLIC = [fit, load, Classifier, load_config, attach, distribute, LARS, parameter_groups, StepRecord, RunConfig]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_the_example_in_a_public_docstring_runs(public: Any, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    names: dict[str, Any] = {
        "megabatch": megabatch,
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "Image": Image,
        "msgspec": msgspec,
    }
    names |= {
        part.__name__: part for part in (DistributedDataParallel, EvaluationRecord, LARS, StepRecord, parameter_groups)
    }
    names |= {part.__name__: part for part in (CommSettings, attach, connect, current_rank, distribute)}
    (example,) = doctest.DocTestFinder(recurse=False).find(public, public.__name__, globs=names)
    assert example.examples
    try:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in pages() if list(blocks(page, "toml"))], ids=name_of)
def test_recipes_in_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "toml"):
        path = tmp_path / "my.toml"
        path.write_text(text)
        if "[model]" in text:
            load_config(str(path))
        elif "[[arm]]" in text:
            read_any_design(str(path))
        else:  # part of a recipe
            path.write_text(f'extends = "fashion"\n{text}')
            load_config(str(path))


def test_a_wrong_option_and_a_wrong_setting_are_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["train", "--rank", "2"])
    with pytest.raises(UserError, match="there is no setting"):
        load_config("fashion", ["batch.size=2"])
