"""What is synced and renamed, in order, instead of waiting for the disk."""

import os
from pathlib import Path

import pytest

from megabatch.io.disk import WRITING


def record_disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """("sync" or "rename", a file's name), from now on."""
    events: list[tuple[str, str]] = []
    rename = Path.rename

    def note_sync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append(("sync", name.rpartition("-")[0] if name.startswith(WRITING) else name))  # its end is random

    def note_rename(path: Path, target: Path) -> Path:
        events.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    return events
