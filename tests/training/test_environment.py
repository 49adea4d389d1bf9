import json

import pytest

from megabatch.training.environment import describe_environment


def test_the_environment_is_written_from_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    text = json.dumps(describe_environment())
    assert "hunter2" not in text and '"NCCL_ALGO": "Tree"' in text
