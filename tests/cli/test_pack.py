"""The command `megabatch pack`."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from tests.support.pictures import write_files


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_files(tmp_path / "photos", [f"{'ab'[at % 2]}/{at}.jpg" for at in range(12)], size=(80, 60))


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["pack", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_packing_prints_its_result_and_the_command_to_use_it() -> None:
    text = output("photos", "out", "--shorter-side", "32", "--quality", "80", "--shard-mb", "1")
    lines = text.splitlines()
    assert lines[0] == "packed    12 images of 2 classes in 1 shard: out"
    assert re.fullmatch(r"size      0.0\d MB in, 0.0\d MB out", lines[1]) and "images/s" in lines[2]
    assert lines[-1] == "train     megabatch train photos data.source=out"
    assert sorted(path.name for path in Path("out").iterdir()) == [
        ".pack.lock",
        "classes.txt",
        "index.npz",
        "train-000000.tar",
    ]


def test_packing_warns_of_classes_named_like_splits() -> None:
    write_files(Path(), [f"set/{part}/{name}/1.jpg" for part in ("Train", "Valid") for name in "ab"])
    assert "warning" not in output("set", "out")
    assert {path.name for path in Path("out").glob("*.tar")} == {"train-000000.tar", "val-000000.tar"}
    Path("set/Valid").rename("set/holdout")
    first = output("set", "other").splitlines()[0]
    assert first.startswith(f"warning   {Path('set').resolve()} has classes named like splits: Train; ")


def test_repeating_a_complete_pack_reports_it() -> None:
    output("photos", "my out")
    text = output("photos", "my out", "--verify")
    assert "complete  my out already contains this pack: 12 images of 2 classes in 1 shard" in text
    assert "verified  my out: all checksums match" in text
    assert text.splitlines()[-1] == "train     megabatch train photos 'data.source=my out'"


def test_verifying_a_damaged_pack_is_an_error_that_names_the_image() -> None:
    output("photos", "out", "--verify")
    shard = Path("out/train-000000.tar")
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    for arguments in (["photos", "out", "--verify"], ["out", "--verify"]):
        with pytest.raises(UserError, match=r"first out/train-000000.tar at offset 512 \([ab]/"):
            output(*arguments)


def test_skipped_images_are_named_and_counted() -> None:
    Path("photos/a/2.jpg").write_bytes(b"")
    Path("photos/b/3.jpg").write_bytes(b"text")
    with pytest.raises(UserError, match=r"photos/[ab]/[23].jpg: it is .*;.*--on-error skip"):
        output("photos", "out")
    text = output("photos", "out", "--on-error", "skip")
    assert "packed    10 images" in text and "skipped   2 in total" in text
    assert "photos/a/2.jpg: it is empty" in text and "photos/b/3.jpg: it is not in a format that Pillow reads" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["photos"], r"megabatch pack photos: no output folder.*megabatch pack photos OUT"),
        (["photos", "out", "--on-error", "ignore"], r"--on-error='ignore' is not one of raise, skip; nearest: "),
        (["gone", "out"], r"gone does not exist; give a folder of class folders"),
        (["photos", "photos/out"], r"photos/out is inside photos"),
        (["photos", "--verify"], r"photos has no index.npz .*no checksums; give a finished megabatch pack"),
    ],
)
def test_invalid_arguments_give_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        output(*arguments)
    assert not Path("out").exists()


def test_without_a_terminal_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.cli.pack.QUIET_S", -1.0)
    lines = output("photos", "out", "--verify").splitlines()
    assert lines[0].startswith("1/12 images ") and "MB/s ETA" in lines[0]
    assert lines[11].startswith("12/12 images ") and lines[11].endswith("ETA 0 s")
