"""The results that lie in docs/studies: pages say what their JSON says."""

import re
from pathlib import Path

import msgspec
import pytest

from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.preflight.reference_results import REFERENCE_RESULTS
from megabatch.studies.conduct import arm_so_far
from megabatch.studies.figures import draw_figures
from megabatch.studies.files import read_design
from megabatch.studies.kept import take_over
from megabatch.studies.page import figure_file, load_study, page
from megabatch.studies.verdict import points, top1_gap

FOLDER = Path(__file__).parents[2] / "docs" / "studies"
STUDIES = sorted(path.stem for path in FOLDER.glob("*.json"))


def without_prose(config: RunConfig) -> RunConfig:
    return msgspec.structs.replace(config, name="any", about="", provenance={})


def words_of(svg: str) -> list[str]:
    return re.findall("<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", STUDIES)
def test_pages_are_computed_from_their_json(name: str) -> None:
    study = load_study(FOLDER / f"{name}.json")
    drawings = draw_figures(study)
    assert (FOLDER / f"{name}.md").read_text() == page(study, drawings)
    assert study.command == f"megabatch study {name}"
    for drawing in drawings:  # lines may differ in their last digits on another machine; words do not
        assert words_of((FOLDER / figure_file(study, drawing)).read_text()) == words_of(drawing.svg)


@pytest.mark.parametrize("name", STUDIES)
def test_results_are_those_of_the_designs(name: str) -> None:
    """All of them are taken by a later start, which runs what is missing."""
    design, study = read_design(name), load_study(FOLDER / f"{name}.json")
    assert (study.question, study.setup, study.paired) == (design.question, design.setup, design.paired)
    assert (study.criteria, study.claims) == (list(design.criteria), list(design.claims))
    assert study.curve_claims == list(design.curve_claims)
    results = take_over(design, study, name)
    assert len(results) == study.num_runs
    assert study.arms == [arm_so_far(design, arm, results) for arm in design.arms]


@pytest.mark.parametrize(
    ("recipe", "study", "arm"),
    [
        ("fashion-128", "large-batch", "Nesterov, 128"),
        ("fashion-3k", "large-batch", "LARS, 3,072"),
        ("fashion-8k", "large-batch", "LARS, 8,192"),
        ("fashion-90-64", "large-batch-90", "Nesterov, 64"),
        ("fashion-90-1k", "large-batch-90", "LARS, 1,024"),
        ("fashion-90-4k", "large-batch-90", "LARS, 4,096"),
    ],
)
def test_recipes_carry_the_values_that_were_found(recipe: str, study: str, arm: str) -> None:
    found, design = load_study(FOLDER / f"{study}.json").arm(arm), read_design(study)
    chosen = [f"optim.learning_rate={found.learning_rate}"]
    if found.momentum is not None:
        chosen.append(f"optim.momentum={found.momentum}")
    studied = load_config(design.recipe, [*design.settings, *found.settings, *chosen])
    (reference,) = (result for result in REFERENCE_RESULTS if result.source == f"megabatch, {recipe}")
    assert without_prose(load_config(recipe)) == without_prose(studied)
    assert (reference.learning_rate, reference.top1) == (
        found.learning_rate,
        round(sum(found.top1s) / len(found.top1s), 4),
    )


@pytest.mark.parametrize(
    ("study", "arm", "sentence"),
    [
        ("large-batch-90", "LARS, 1,024", "LARS {above} points ahead (95 % interval {from_above} to {to_above})"),
        ("large-batch-90", "Nesterov, 1,024", "tuned momentum {above} ahead"),
        ("large-batch-90", "linear scaling, 1,024", "linear scaling {below} behind"),
        ("large-batch", "LARS, 3,072", "LARS {below} points behind (95 % interval {low} to {high})"),
        ("large-batch", "Nesterov, 3,072", "tuned momentum {below}"),
        ("precision", "fp16, dynamic scale", "{above} points above (95 % interval {from_above} to {to_above})"),
    ],
)
def test_the_readme_says_what_the_json_says(study: str, arm: str, sentence: str) -> None:
    found = load_study(FOLDER / f"{study}.json")
    gap = top1_gap(found, found.arm(arm), found.arm(found.baseline))
    assert gap and gap.interval
    figures = {
        "below": gap.size,
        "low": gap.interval.low,
        "high": gap.interval.high,
        "above": -gap.size,
        "from_above": -gap.interval.high,
        "to_above": -gap.interval.low,
    }
    readme = (FOLDER.parents[1] / "README.md").read_text().splitlines()
    (row,) = (line for line in readme if f"`megabatch study {study}`" in line)
    assert sentence.format_map({name: points(value) for name, value in figures.items()}) in row
