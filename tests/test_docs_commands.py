"""Every command of README and docs: options, recipes and settings are there, and what is quick is run.

The reader's folder has what the pages speak of: photos, a recipe, a run.  Commands run in this process, since starting
torch takes seconds; `train` is run with --dry-run, which resolves and prints everything and trains nothing.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.cli.overrides import split_arguments_or_run
from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.errors import UserError
from megabatch.experiments.design import read_design
from tests.support.pages import ROOT, Command, blocks, commands, inline_commands, make_targets, name_of, pages
from tests.support.photos import make_folder
from tests.support.use import train_photos

# Run as they stand.
QUICK = {"compare", "eval", "export", "pack", "predict", "recipes", "report", "runs", "settings", "show", "simulate"}
QUICK |= {"train"}
# Commands of which options, recipe and settings are checked, and no more: why, and what runs them.
NOT_RUN = {
    "bench": "it measures, for minutes; tests/lab/bench",
    "chaos": "minutes; tests/lab/chaos/test_command.py",
    "doctor": "it measures, for half a minute; tests/training/test_doctor.py",
    "fuzz": "minutes; tests/lab/fuzz/test_command.py",
    "lr-range": "12 epochs eight times; tests/experiments/test_lr_range.py",
    "plan": "it starts ranks and measures links; tests/distributed/test_tune.py",
    "selftest": "minutes, on one's own devices; tests/rehearsal/test_selftest.py",
    "profile": "it measures; tests/training/test_profile.py, tests/cli/test_profile.py",
    "study": "hours; tests/experiments",
}
# Lines of which the same is true, by a part of them.
NOT_RUN_HERE = {
    "/data/": "ImageNet is not here",
    "--open": "it opens a browser; tests/report/test_command.py",
    "torchvision.models:resnet18": "torchvision may not be installed; tests/models/test_torchvision.py",
    "timm:create_model": "timm may not be installed; tests/models/test_torchvision.py",
    "runs/photos-003": "the same as those of docs/use.md, and exporting takes seconds",
}
# What a page leaves to its reader, and what takes too long otherwise.
STANDS_FOR = {
    "RUN": "runs/photos-001",
    "FOLDER": "my_photos",
    "RECIPE": "fashion",
    "runs/fashion-001": "runs/photos-001",
    "runs/fashion-002": "runs/photos-002",
    "runs/fashion-*": "runs/photos-001",  # by a shell, both
    "step-00000390": "last",
    "8..2048": "8",
}
# Options of torchrun that a page leaves to its reader.
TORCHRUN = {
    "--node-rank=I": "--node-rank=1",
    "--nnodes=HOSTS": "--nnodes=2",
    "--nproc-per-node=GPUS": "--nproc-per-node=8",
}
# Python in pages that another test runs.
PYTHON_ELSEWHERE = {"docs/attach.md": "tests/distributed/test_attach_scripts.py"}


def with_names(words: tuple[str, ...]) -> list[str]:
    return [STANDS_FOR.get(word, word) for word in words]


ALL = [command for page in pages() for command in commands(page)]
FOUND = list({(command.before, *with_names(command.words)): command for command in reversed(ALL)}.values())


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    make_folder(folder / "my_photos", per_class=6)
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
    """The command and its arguments, as the real command line reads them; a wrong option is an error."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("megabatch", list(words), resilient_parsing=False)
    path = []
    while hasattr(group, "commands"):
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        path.append(name)
        context = group.make_context(name, rest, parent=context)
    return path[0], context.params


def check_torchrun(before: str) -> None:
    """The options are torchrun's."""
    words = [TORCHRUN.get(word, word) for word in shlex.split(before)[1:] if word != "..."]
    parsed, unknown = get_args_parser().parse_known_args([*words, "megabatch"])
    assert not unknown and parsed.module and parsed.training_script == "megabatch"


def test_commands_are_found() -> None:
    assert len(FOUND) > 40
    assert {command.page for command in FOUND} > {"README.md", "docs/use.md", "docs/clusters.md"}


def test_what_is_not_run_here_is_run_by_the_tests_that_are_named() -> None:
    named = re.findall(r"tests/[\w/.]+", " ".join([*NOT_RUN.values(), *NOT_RUN_HERE.values()]))
    assert len(named) > 8 and all((ROOT / path).exists() for path in named)


@pytest.mark.parametrize("command", FOUND, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_a_command_of_a_page_works(command: Command, inside: Path) -> None:
    words = with_names(command.words)
    name, given = parse(words)
    assert name in QUICK | set(NOT_RUN), f"a new command: say in {Path(__file__).name} whether it is quick"
    if command.before.startswith("torchrun"):
        check_torchrun(command.before)
    if "given" in given and name != "simulate":
        recipe, overrides = split_arguments_or_run(given["given"])
        if command.said:
            overrides = []  # which are to be refused, below
        load_config(recipe, overrides, needs_source=False)
    if name in NOT_RUN or any(part in command.line for part in NOT_RUN_HERE):
        return
    if name == "train":
        words = [*words, "--dry-run"]
    piped = command.before.removesuffix("|") if command.before.endswith("|") else ""
    stdin = subprocess.run(["bash", "-c", piped], capture_output=True, check=True).stdout if piped else None
    result = CliRunner().invoke(app, words, input=stdin)
    if command.said:
        assert command.said in f"{result.exception}\n{result.stderr}"
    else:
        assert result.exit_code == 0, f"{result.exception!r} {result.output}"
    if command.into:
        assert result.stdout.strip()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_command_in_a_sentence_has_the_options_that_it_names(page: Path) -> None:
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


def test_make_has_the_targets_that_pages_name() -> None:
    targets = make_targets()
    for page in pages():
        named = {word for text in blocks(page, "") for word in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)}
        assert named <= targets, name_of(page)


@pytest.mark.parametrize("page", [page for page in pages() if list(blocks(page, "python"))], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if elsewhere := PYTHON_ELSEWHERE.get(name_of(page)):
        assert page.name in (ROOT / elsewhere).read_text()
        return
    # One core: two threads beside busy ranks take ten times as long.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    for text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), {"model": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("page", [page for page in pages() if list(blocks(page, "toml"))], ids=name_of)
def test_the_recipes_of_a_page_are_recipes(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "toml"):
        path = tmp_path / "my.toml"
        path.write_text(text)
        if "[model]" in text:
            load_config(str(path))
        elif "[[arm]]" in text:
            read_design(str(path))
        else:  # a part of one
            assert tomllib.loads(text).keys() <= {"provenance"}


def test_a_wrong_option_and_a_wrong_setting_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["train", "--rank", "2"])
    with pytest.raises(UserError, match="there is no setting"):
        load_config("fashion", ["batch.size=2"])
