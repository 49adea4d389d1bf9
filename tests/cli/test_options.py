"""Invalid numbers and paths on the command line: one line and exit code 2."""

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from megabatch.cli.app import app, main
from megabatch.cli.overrides import MOST, choose_ranks
from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.experiments.search import plan_grid
from megabatch.experiments.trials import choose_jobs

HUGE = "1" + 30 * "0"
# Options that their commands check, with a suggestion of the nearest value; tested below.
CHECKED_LATER = {"ranks", "hosts", "jobs", "trials", "coarse", "low", "high", "batch_per_rank", "target"}


def commands(group: typer.Typer) -> Iterator[Any]:
    yield from (command.callback for command in group.registered_commands)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance)


def test_every_number_on_the_command_line_has_bounds() -> None:
    seen = 0
    for command in commands(app):
        hints = typing.get_type_hints(inspect.unwrap(command), include_extras=True)
        for name, hint in hints.items():
            kind, *options = typing.get_args(hint) or [None]
            if re.search(r"\b(int|float)\b", str(kind)) and options and name not in CHECKED_LATER:
                seen += 1
                option: Any = options[0]
                assert option.min is not None and option.max is not None, f"{command.__name__}: {name}"
    assert seen > 15


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--ranks", "-1"],
        ["train", "--ranks", HUGE],
        ["train", "--ranks", "x"],
        ["train", "--max-restarts", "-1"],
        ["train", "--max-restarts", HUGE],
        ["train", "--resume", "x" * 300],
        ["train", "--resume", "loop"],
        ["pack", "loop", "packed"],
        ["eval", "loop"],
        ["show", "--ranks", "nan"],
        ["show", "--cluster", "x" * 300 + ".toml"],
        ["show", "--cluster", "p40-roce100", "--profile", "x" * 300],
        ["doctor", "--seconds", "nan"],
        ["profile", "--seconds", "inf"],
        ["profile", "--seconds", "-1"],
        ["chaos", "--kills", HUGE],
        ["chaos", "--seed", "-1"],
        ["selftest", "--ranks", HUGE],
        ["selftest", "--ranks", "-1"],
        ["pack", "here", "there", "--shard-mb", HUGE],
        ["predict", "x" * 300, "y"],
        ["predict", "run", "y", "--top", "0"],
        ["eval", "x" * 300],
        ["lr-range", "--trials", HUGE],
        ["lr-range", "--low", "nan"],
        ["lr-range", "--jobs", HUGE],
        ["simulate", "resnet50", "--cluster", "p40-roce100", "--ranks", HUGE],
        ["simulate", "resnet50", "--cluster", "p40-roce100", "--ranks", "8", "--batch-per-rank", HUGE],
        ["bench", "train", "--rounds", HUGE],
        ["compare", "loop"],
        ["compare", "x" * 300],
        ["compare", "loop", "--target", "nan"],
        ["compare", "loop", "--target", "1.5"],
        ["compare", "loop", "--json", "--csv"],
        ["no-such-command"],
        ["train", "--no-such-option"],
    ],
)
def test_invalid_options_give_one_line_and_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(sys, "argv", ["megabatch", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, errors = capfd.readouterr()
    assert ended.value.code == 2
    assert out == "" or (words[0] in ("train", "selftest") and out.startswith("starting ") and out.count("\n") == 1)
    assert len(errors.splitlines()) == 1 and errors.startswith("megabatch: ") and len(errors) < 700
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_options_checked_by_commands_suggest_a_value() -> None:
    config = load_config("smoke")
    for ranks in (0, -1, MOST + 1, 10**30):
        with pytest.raises(UserError, match=r"--ranks .*;"):
            choose_ranks(config, ranks)
    for jobs in (0, -1, 10**30):
        with pytest.raises(UserError, match="nearest: --jobs"):
            choose_jobs(jobs, "cpu")
    for low, high, coarse, trials in ((0, 1, 4, 8), (1, float("inf"), 4, 8), (1, 2, 1, 8), (1, 64, 4, 10**30)):
        with pytest.raises(UserError, match=r"; (nearest|for example)"):
            plan_grid(low, high, 0.1, coarse, trials)
