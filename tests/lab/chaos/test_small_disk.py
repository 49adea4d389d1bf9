from pathlib import Path

import pytest
from megabatch_lab.chaos.site import small_disk, why_no_disk


def test_small_disk_can_be_filled_freed_and_unmounted(tmp_path: Path) -> None:
    reason = why_no_disk(tmp_path / "try")
    if reason:
        pytest.skip(f"needs mounts in a namespace: {reason}")
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk.seen / "kept").write_text("kept")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.seen / "new").write_bytes(b"x" * 5000)
        disk.free()
        (disk.seen / "new").write_bytes(b"x" * 5000)
        assert (disk.seen / "kept").read_text() == "kept"
    assert list((tmp_path / "disk").iterdir()) == []
