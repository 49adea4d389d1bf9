"""The pages in docs/studies match their JSON."""

import re
import shlex
from functools import partial
from pathlib import Path

import msgspec
import pytest

from megabatch.cli.study import BATCH_LIMIT, batch_limit_design
from megabatch.config.loading import load_config
from megabatch.config.reference_results import REFERENCE_RESULTS
from megabatch.config.schema import RunConfig
from megabatch.experiments import time_to_accuracy as times
from megabatch.experiments.batch_limit import target_rows
from megabatch.experiments.conduct import arm_so_far, earlier_results
from megabatch.experiments.design import Design, read_design
from megabatch.experiments.drawing import to_svg
from megabatch.experiments.evidence import Study
from megabatch.experiments.page import load_study, page, plot_file
from megabatch.experiments.plots import draw_plots
from megabatch.experiments.verdict import points, range_words, top1_gap, top1_spread

FOLDER = Path(__file__).parents[2] / "docs" / "studies"
ALL = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.json"))}
TIMES = {name for name, text in ALL.items() if "target" in msgspec.json.decode(text)}
STUDIES = [name for name in ALL if name not in TIMES]


def design_of(name: str, study: Study) -> Design:
    """Return the design that the study's command stands for."""
    _, verb, subject, *words = shlex.split(study.command)
    assert verb == "study"
    if subject != BATCH_LIMIT:
        assert subject == name and not words
        return read_design(name)
    options = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    given = [word for word in words if not word.startswith("--")]
    margin, seeds, trials = float(options["margin"]), int(options["seeds"]), int(options["trials"])
    return batch_limit_design(given, options["batches"], margin, seeds, trials)


def without_prose(config: RunConfig) -> RunConfig:
    return msgspec.structs.replace(config, name="any", about="", provenance={})


def words_of(svg: str) -> list[str]:
    return re.findall("<text[^>]*>([^<]*)</text>", svg)


def page_of(name: str) -> tuple[str, dict[str, str]]:
    """Return the page of a study, and its drawings by file name."""
    if name in TIMES:
        of_times = msgspec.json.decode(ALL[name], type=times.TimeStudy)
        return times.page(of_times), {f"{name}.svg": to_svg(partial(times.draw, of_times))}
    study = load_study(FOLDER / f"{name}.json")
    plots = draw_plots(study)
    return page(study, plots), {plot_file(study, plot): plot.svg for plot in plots}


@pytest.mark.parametrize("name", ALL)
def test_pages_are_computed_from_their_json(name: str) -> None:
    text, drawings = page_of(name)
    assert (FOLDER / f"{name}.md").read_text() == text
    for file, svg in drawings.items():  # lines may differ in their last digits on another machine; words do not
        assert words_of((FOLDER / file).read_text()) == words_of(svg)


@pytest.mark.parametrize("name", STUDIES)
def test_results_match_their_designs(name: str) -> None:
    """A later start uses all results and runs only missing trials."""
    study = load_study(FOLDER / f"{name}.json")
    design = design_of(name, study)
    assert design.name == name
    assert (study.question, study.setup, study.paired) == (design.question, design.setup, design.paired)
    assert (study.criteria, study.claims) == (list(design.criteria), list(design.claims))
    assert study.curve_claims == list(design.curve_claims)
    results = earlier_results(design, study, name)
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
        ("cifar10", "cifar10", "airbench94"),
    ],
)
def test_recipes_have_the_values_that_studies_found(recipe: str, study: str, arm: str) -> None:
    found, design = load_study(FOLDER / f"{study}.json").arm(arm), read_design(study)
    chosen = [f"optim.learning_rate={found.learning_rate}"]
    if found.momentum is not None:
        chosen.append(f"optim.momentum={found.momentum}")
    studied = load_config(design.recipe, [*design.settings, *found.settings, *chosen])
    (reference,) = (result for result in REFERENCE_RESULTS if result.source == f"megabatch, {recipe}")
    assert without_prose(load_config(recipe)) == without_prose(studied)
    assert reference.learning_rate == found.learning_rate
    assert reference.top1 == pytest.approx(sum(found.top1s) / len(found.top1s), abs=5.1e-5)  # four digits


@pytest.mark.parametrize(
    ("study", "lower", "higher", "sentence"),
    [
        ("large-batch-90", "Nesterov, 64", "LARS, 1,024", "LARS {} points ahead (95 % interval {})"),
        ("large-batch-90", "Nesterov, 64", "Nesterov, 1,024", "tuned momentum is {} ahead"),
        ("large-batch-90", "linear scaling, 1,024", "Nesterov, 64", "linear scaling {} behind"),
        ("large-batch", "LARS, 3,072", "Nesterov, 128", "LARS {} points behind (95 % interval {})"),
        ("large-batch", "Nesterov, 3,072", "Nesterov, 128", "tuned momentum is {} points behind"),
        ("precision", "fp32", "fp16, dynamic scale", "{} points above (95 % interval {})"),
    ],
)
def test_table_of_results_matches_the_json(study: str, lower: str, higher: str, sentence: str) -> None:
    found = load_study(FOLDER / f"{study}.json")
    gap = top1_gap(found, found.arm(lower), found.arm(higher))
    assert gap and gap.interval
    readme = (FOLDER.parent / "README.md").read_text().splitlines()
    (row,) = (line for line in readme if f"`megabatch study {study}`" in line)
    assert sentence.format(points(gap.size), range_words(gap.interval)) in row


def test_accuracy_on_cifar10_matches_the_json() -> None:
    spread = top1_spread(load_study(FOLDER / "cifar10.json").arm("airbench94"))
    assert spread and spread.interval
    sentence = f"{points(spread.mean)} % (95 % interval {range_words(spread.interval)})"
    for readme in (FOLDER.parent / "README.md", FOLDER.parent.parent / "README.md"):
        (row,) = (line for line in readme.read_text().splitlines() if "`megabatch study cifar10`" in line)
        assert sentence in row


def test_speedup_of_growing_images_matches_the_json() -> None:
    study = msgspec.json.decode(ALL["image-sizes"], type=times.TimeStudy)
    for arm, file, sentence in (
        ("growing", "README.md", "{} times as fast to 55 % top-1 (95 % interval {})"),
        ("growing", "studies.md", "{} times as fast as a fixed size of 64** (95 % interval {};"),
        ("small", "studies.md", "A fixed size of 48 pixels is {} times as fast ({})."),
    ):
        found = times.time_ratio(study, study.arm(arm), study.arms[0])
        assert found and found.interval
        words = sentence.format(f"{found.size:.2f}", f"{found.interval.low:.2f} to {found.interval.high:.2f}")
        assert words in " ".join((FOLDER.parent / file).read_text().split())


def test_batch_limit_of_fashion_matches_the_json() -> None:
    study = load_study(FOLDER / "batch-limit-fashion.json")
    text = " ".join((FOLDER.parent / "batch-size.md").read_text().split())
    for name, sentence in (
        ("batch 256", "Batch 256 is {} points lower, but with five seeds the 95 % interval ({})"),
        ("batch 1024", "Batch 1,024 is {} points lower ({})."),
    ):
        gap = top1_gap(study, study.arm(name), study.arm("batch 64"))
        assert gap and gap.interval
        assert sentence.format(points(gap.size), range_words(gap.interval)) in text
    for name, epochs, _, _, _, forecast in target_rows(study)[1:4]:
        assert f"| {int(name.split()[1]):,} | {epochs} | {forecast} |" in text
