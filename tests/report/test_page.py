"""The page of a run is complete, small and escaped."""

import base64
import hashlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.report.page import page_of, write_report
from megabatch.report.view import read_run
from megabatch.runs import files
from megabatch.runs.records import Mistakes
from tests.support.made_up_run import make_run, png

HOSTILE = "<script>alert(1)</script>"
SECTIONS = ("verdict", "time", "learning", "communication", "ranks", "events", "classes-section", "settings")
VOID = ("meta", "img", "br", "link")


class Elements(HTMLParser):
    """The elements of a page; checks that each is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.ids += [str(value) for name, value in attrs if name == "id"]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Elements:
    elements = Elements(page)
    assert not elements.open
    assert len(set(elements.ids)) == len(elements.ids)
    return elements


def test_complete_run_has_every_section_and_a_reproducible_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=300)
    page = page_of([read_run(folder)])
    elements = read(page)
    assert {*SECTIONS, "measures", "reliability"} <= set(elements.ids)
    assert page == page_of([read_run(folder)])
    for text in ("exposed communication", "torus", "Ankle boot", "begins at step 114", "lars", "NVIDIA A100"):
        assert text in elements.text
    assert elements.names.count("img") == 24
    assert elements.names.count("details") >= 10


def test_policy_allows_only_the_pages_style_and_script(tmp_path: Path) -> None:
    page = page_of([read_run(make_run(tmp_path / "run", steps=20))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and "default-src &#x27;none&#x27;" in policy[1]
    for element in ("style", "script"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src &#x27;sha256-{digest}" in policy[1]
    assert " style=" not in page and not re.search(r"https?://(?!www\.w3\.org)", page)


def test_markup_in_records_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / f"run{HOSTILE.replace('/', '')}", steps=40, classes=[HOSTILE, *"bcdefghij"])
    usual = read(page_of([read_run(make_run(tmp_path / "usual", steps=40))]))
    config = (folder / files.CONFIG).read_text()
    (folder / files.CONFIG).write_text(config.replace("/data/imagenet", HOSTILE).replace("resnet50", HOSTILE))
    (folder / files.ENVIRONMENT).write_bytes(
        msgspec.json.encode({HOSTILE: HOSTILE, "command": HOSTILE, "gpus": [HOSTILE]})
    )
    (folder / files.LOG).write_text(f"2026-11-17 20:00:00 begins at step 0\n2026-11-17 20:00:01 warning: {HOSTILE}\n")
    plan = (
        (folder / files.PLAN)
        .read_bytes()
        .replace(b"layer0.weight", HOSTILE.encode())
        .replace(b"by price", HOSTILE.encode())
    )
    (folder / files.PLAN).write_bytes(plan)
    trace = (folder / files.STEP_TRACE).read_bytes().replace(b"wait for all-reduces", HOSTILE.encode())
    (folder / files.STEP_TRACE).write_bytes(trace)
    for page in (page_of([read_run(folder)]), page_of([read_run(folder), read_run(tmp_path / "usual")])):
        assert HOSTILE not in page and "&lt;script&gt;alert(1)" in page
        elements = read(page)
        scripts = [name for name in elements.names if name == "script"]
        assert len(scripts) <= usual.names.count("script")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=40))
def test_class_names_do_not_change_the_elements(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if not folder.exists():
        make_run(folder, steps=20)
    view = read_run(folder)
    usual = read(page_of([view]))
    view.classes[0] = name
    assert read(page_of([view])).names == usual.names


def test_long_run_with_many_ranks_and_classes_has_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20_000, ranks=512, classes=[f"n{number:08d}" for number in range(1000)])
    page = page_of([read_run(folder)])
    assert len(page.encode()) < 500_000  # 100,000 steps are drawn with as many points
    read(page)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_run_of_few_steps_has_a_page(steps: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=steps, status=None)
    elements = read(page_of([read_run(folder)]))
    assert "killed" in elements.text


@pytest.mark.parametrize("kept", [(), (files.METRICS,), (files.LOG, files.ENVIRONMENT)])
def test_missing_files_are_left_out(kept: tuple[str, ...], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30)
    for path in folder.iterdir():
        if path.name not in (files.CONFIG, *kept):
            path.unlink()
    elements = read(page_of([read_run(folder)]))
    assert "settings" in elements.ids and "communication" not in elements.ids


@pytest.mark.parametrize("name", [files.SUMMARY, files.PLAN, files.MISTAKES, files.STEP_TRACE, files.MODEL])
def test_damaged_file_is_named_on_the_page(name: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30)
    (folder / name).write_bytes(b"{\xff")
    assert f"{name} is damaged" in read(page_of([read_run(folder)])).text


def test_damaged_row_is_an_error_and_a_truncated_last_row_is_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30)
    rows = (folder / files.METRICS).read_bytes()
    (folder / files.METRICS).write_bytes(rows[:-20])
    assert read_run(folder).num_steps == 30  # the truncated row is the last evaluation
    (folder / files.METRICS).write_bytes(rows.replace(b'"loss"', b'"lost"', 1))
    with pytest.raises(UserError, match=r"metrics\.jsonl, row 1: .*damaged"):
        write_report([folder])
    with pytest.raises(UserError, match=r"run's folder"):
        write_report([tmp_path])


def test_nan_loss_is_a_gap_and_a_finding(tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=60, status="diverged"))
    for place in range(40, 60):  # a run ends before it writes such a row
        view.steps.of["loss"][place] = math.nan
    text = read(page_of([view])).text
    assert "The loss was not finite" in text and "first such step is 41" in text and "Gaps" in text


def test_pictures_are_png_or_jpeg_and_limited_in_size(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    mistakes = msgspec.json.decode((folder / files.MISTAKES).read_bytes(), type=Mistakes)
    example = mistakes.examples[0]
    wrong = [
        replace(example, picture="x' onerror='alert(1)"),
        replace(example, picture=base64.b64encode(b"<svg onload=alert(1)>").decode()),
        replace(example, picture=png(1) + "!"),
    ]
    photo = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(20)).decode()
    kept = [replace(example, picture=png(3)), replace(example, picture=photo)]
    (folder / files.MISTAKES).write_bytes(msgspec.json.encode(replace(mistakes, examples=wrong + kept)))
    page = page_of([read_run(folder)])
    assert read(page).names.count("img") == 2 and f"data:image/jpeg;base64,{photo}" in page
    many = [replace(example, picture=png(3, size=120))] * 400
    (folder / files.MISTAKES).write_bytes(msgspec.json.encode(replace(mistakes, examples=many)))
    assert len(page_of([read_run(folder)])) < 1_000_000


def test_page_of_several_runs_lists_their_differences(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "one", steps=60),
        make_run(tmp_path / "two", steps=60, seed=2, learning_rate=8.0, fp16=False),
        make_run(tmp_path / "none", steps=0, status=None),
    ]
    elements = read(page_of([read_run(folder) for folder in folders]))
    differing = re.findall(r"optim\.learning_rate|precision\.name|batch\.global|model\.name", elements.text)
    assert differing == ["optim.learning_rate", "precision.name"]
    assert {"loss", "accuracy", "accuracy-time", "throughput", "time-bars"} <= set(elements.ids)


def test_a_run_with_several_sizes_shows_the_steps_speed_and_work_of_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=300)
    rows = [msgspec.json.decode(row) for row in (run / files.METRICS).read_bytes().splitlines()]
    for row in rows:
        if row["kind"] == "step":
            row |= {"image_size": 112 if row["step"] <= 200 else 224, "images_per_s": 10.0 if row["step"] % 2 else 30.0}
            row |= {"epoch": row["step"] / 100}
        else:
            row |= {"raw_top1": 0.125}
    (run / files.METRICS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    text = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", page_of([read_run(run)])))
    assert "112 1 to 200 2 0.5 15" in text and "224 201 to 300 1 1 15" in text  # the mean time of 10/s and 30/s
    assert "raw top-1" in text
    assert "Image sizes" not in page_of([read_run(make_run(tmp_path / "other", steps=30))])
