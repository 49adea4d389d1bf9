import json
import sys

import pytest

from megabatch.training.run import describe_environment


def test_the_environment_is_written_from_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    text = json.dumps(describe_environment())
    assert "hunter2" not in text and '"NCCL_ALGO": "Tree"' in text


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/opt/venv/bin/megabatch", "train", "a b.toml"], "megabatch train 'a b.toml'"),  # srun, mpiexec
        (["/opt/lib/megabatch/__main__.py", "train"], "megabatch train"),  # torchrun -m megabatch
        (["my_script.py", "train"], None),
    ],
)
def test_the_command_of_a_rank_is_recorded_under_any_launcher(
    arguments: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGABATCH_COMMAND", raising=False)
    monkeypatch.setattr(sys, "argv", arguments)
    assert describe_environment()["command"] == command
