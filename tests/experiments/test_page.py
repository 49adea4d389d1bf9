import math
from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.experiments.page import load_study, page, write_study
from megabatch.experiments.plots import draw_plots
from tests.support.made_up_study import BASELINE, TRIAL, arm, pair, searched, study

BASE = [0.9300, 0.9310, 0.9290]


def test_page_starts_with_the_answer_and_has_every_value() -> None:
    text = page(pair(BASE, [0.9288, 0.9298, 0.9278]), [])
    answer = f"- {TRIAL} is 0.12 points below {BASELINE} (95 % interval -0.11 to 0.35); the criterion is 0.3: holds"
    assert text.startswith(f"# Huge batches\n\nDo huge batches lose accuracy?\n\n{answer}, but the interval extends")
    assert "| SGD at 128 | about SGD at 128 | 0.2 | 93.00 | 0.10 | 92.75 to 93.25 | baseline | 0 of 3 |" in text
    assert "| 0.2 | 92.88 | 0.10 | 92.63 to 93.13 | 0.12 (-0.11 to 0.35) | 0 of 3 |" in text
    assert "| LARS at 3,072 | 0.2 | 0.1: 91.00 · **0.2: 93.00** · 0.4: 50.00 · 0.8: diverged |" in text
    assert "`batch.global=3072` `optim.name=lars` | 1, 2, 3 |" in text
    for expected in (
        "`megabatch study large-batch`",
        f"- The paper finds {TRIAL} worse. Here {TRIAL} is 0.12 points below {BASELINE} (95 % interval -0.11 to ",
        "these seeds do not distinguish them.",
        # The invented curve starts at 1 - 0.5 and ends at 1 - 1 times the mean.
        "| SGD at 128 | 0.535 at 1 | 0.07 at 3 | 0.535 at 1 | 0.07 at 3 |",
        "torch 2.13.0 on 2 cores",
        "1.5 core hours",
    ):
        assert expected in text


def test_page_of_one_arm_compares_it_only_with_its_published_result() -> None:
    made = study([msgspec.structs.replace(arm(BASELINE, BASE), published=0.931, tuned=[], num_trials=0)])
    made = msgspec.structs.replace(made, claims=[], curve_claims=[])
    text = page(made, [])
    assert (
        f"- {BASELINE} reaches 93.00 % (95 % interval 92.75 to 93.25), 0.10 points below the published 93.10 %" in text
    )
    assert "A gap is" not in text and "learning rate, which was chosen" not in text
    (accuracy,) = (drawing for drawing in draw_plots(made) if drawing.name == "accuracy")
    assert "dashed: the published result" in accuracy.svg and "baseline" not in accuracy.svg + accuracy.caption


def test_searched_momenta_are_named() -> None:
    tuned = [searched(0.2, 0.9, 0.9), searched(0.1, 0.93, 0.95), searched(0.4, None, 0.9)]
    trial = msgspec.structs.replace(arm(TRIAL, BASE, rate=0.1), tuned=tuned, num_trials=3, momentum=0.95)
    made = study([arm(BASELINE, BASE), trial])
    text = page(made, [])
    assert f"| {TRIAL} | about {TRIAL} | 0.1, momentum 0.95 | 93.00 |" in text
    assert (
        f"| {TRIAL} | 0.1, momentum 0.95 | 0.2 with 0.9: 90.00 · 0.4 with 0.9: diverged · **0.1 with 0.95: 93.00** |"
        in text
    )
    (search,) = (drawing for drawing in draw_plots(made) if drawing.name == "search")
    assert f"{TRIAL}, momentum 0.9<" in search.svg and f"{TRIAL}, momentum 0.95<" in search.svg


def test_gap_beyond_the_criterion_does_not_hold() -> None:
    text = page(pair(BASE, [0.92, 0.921, 0.919]), [])
    assert f"- {TRIAL} is 1.00 points below" in text and "the criterion is 0.3: does not hold." in text


def test_diverged_seeds_are_counted_on_the_page() -> None:
    text = page(pair(BASE, [0.93, None, 0.93]), [])
    assert f"- {TRIAL}: 1 of 3 diverged" in text
    assert f"| {TRIAL} | 1 of 3 diverged | 1 of 3 diverged |" in text  # in place of a curve
    assert "| LARS at 3,072 | about LARS at 3,072 | 0.2 | - | - | - | - | 1 of 3 |" in text


def test_single_seed_has_no_interval() -> None:
    text = page(pair(BASE, [0.93]), [])
    assert "| LARS at 3,072 | about LARS at 3,072 | 0.2 | 93.00 | - | none: one seed | 0.00 | 0 of 1 |" in text


def test_files_are_reproducible_and_survive_a_round_trip(tmp_path: Path) -> None:
    made = pair(BASE, [0.928, None, 0.927])
    first = {path.name: path.read_bytes() for path in write_study(made, tmp_path / "a")}
    read = load_study(tmp_path / "a" / "large-batch.json")
    assert read == made
    assert {path.name: path.read_bytes() for path in write_study(read, tmp_path / "b")} == first
    assert {path.name for path in (tmp_path / "b").iterdir()} == set(first)
    assert {"large-batch.json", "large-batch.md", "large-batch-accuracy.svg"} < set(first)
    for name in first:
        assert name.endswith((".json", ".md")) or f"]({name})" in first["large-batch.md"].decode()


def test_values_that_are_not_finite_count_as_diverged(tmp_path: Path) -> None:
    *_, written = write_study(pair(BASE, [0.93, math.nan]), tmp_path)
    assert "1 of 2 diverged" in written.read_text() and "nan" not in written.read_text()
    assert load_study(tmp_path / "large-batch.json").arm(TRIAL).num_diverged == 1


def test_pipe_character_in_a_name_does_not_break_the_table() -> None:
    assert "| a \\| b | about a \\| b | 0.2 |" in page(study([arm("a | b", BASE)]), [])


def test_invalid_study_file_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "large-batch.json"
    with pytest.raises(UserError, match="does not exist"):
        load_study(path)
    other = msgspec.to_builtins(pair(BASE, BASE)) | {"baseline": "unknown"}
    for content, reason in [(b"{}", "missing required field"), (msgspec.json.encode(other), "'unknown' is not an arm")]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=reason) as caught:
            load_study(path)
        assert "\n" not in str(caught.value)
