from pathlib import Path

import pytest
from megabatch_lab.bench import input as bench_input
from megabatch_lab.bench.input import Settings, decodable, jpegs_of, make_photos

from megabatch.errors import UserError
from tests.support.photos import encoded, make_folder, photo

CORES = 1


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".JPEG", ".JPG"])
@pytest.mark.parametrize("name", bench_input.SETS)
def test_packed_arms_read_jpegs_of_any_suffix(tmp_path: Path, suffix: str, name: str) -> None:
    folder = make_folder(tmp_path / "photos", per_class=3)
    for path in folder.rglob("*.jpg"):
        path.rename(path.with_suffix(suffix))
    settings = Settings(image_size=16, batch=4, worker_counts=[0], cores=CORES)
    photos = make_photos(name, folder, jpegs_of(folder), tmp_path / "made", CORES)
    for opener in (
        bench_input.webdataset(photos, settings)[0],
        lambda: bench_input.open_ours(photos.pack, settings),
    ):
        with opener() as epoch:
            assert epoch(1) == 9


def test_files_that_are_not_jpegs_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "photos", per_class=2)
    good = jpegs_of(folder)
    (folder / "bag/7.JPEG").write_bytes(encoded(photo(1), "PNG"))
    (folder / "bag/8.JPEG").write_bytes(encoded(photo(2))[:500])
    (folder / "bag/9.JPEG").write_bytes(b"")
    assert decodable(jpegs_of(folder), folder, CORES) == good
    assert "left out 3 photos that libjpeg-turbo cannot decode, first:" in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "message"), [(".png", "has no JPEGs"), (".jpg", "can decode none of the 3 photos")])
def test_folder_without_jpegs_is_refused(tmp_path: Path, suffix: str, message: str) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"1{suffix}").write_bytes(encoded(photo(1), "PNG"))
    with pytest.raises(UserError, match=f"--source {tmp_path}.* {message}.*; give"):
        bench_input.run(tmp_path, ["as_is"], 32, 8, 40, 1, None, None)


def test_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder; give"):
        jpegs_of(tmp_path / "absent")
