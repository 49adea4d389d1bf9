"""Records of syncs and renames, in order, without waiting for the disk."""

import os
from pathlib import Path

import pytest

from megabatch.io.disk import WRITING


def record_disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that collects ("sync" or "rename", file name) from now on."""
    events: list[tuple[str, str]] = []
    rename = Path.rename

    def record_sync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append(("sync", name.rpartition("-")[0] if name.startswith(WRITING) else name))  # the suffix is random

    def record_rename(path: Path, target: Path) -> Path:
        events.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    return events
