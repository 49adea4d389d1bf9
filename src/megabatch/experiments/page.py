"""A study as files: its JSON, its figures, and a page that says what it shows.  The page is computed from the JSON."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megabatch.errors import UserError
from megabatch.experiments.evidence import Arm, Study, slug
from megabatch.experiments.figures import Drawing, curve_names, draw_figures, mean_curve
from megabatch.experiments.verdict import (
    divergence,
    gap_words,
    judge,
    judge_claim,
    judge_curves,
    points,
    range_words,
    rate_at_edge,
    top1_gap,
    top1_spread,
)
from megabatch.io.disk import write_file
from megabatch.io.reading import Undecodable, read_json

NONE = "-"
NOTE = (
    "Top-1 in %. Intervals hold the mean over seeds with 95 % confidence (Student's t; of gaps Welch's): they are "
    "about other seeds, not other test images, and not about the choice of the rate, which was made with one seed. A "
    "gap counts points below the baseline, so that a negative one lies above it. An arm with a diverged seed has no "
    "mean."
)
PAIRED_NOTE = NOTE.replace(
    "of gaps Welch's", "gaps are taken seed by seed, between runs that begin with the same weights"
)


def write_study(study: Study, folder: Path) -> list[Path]:
    """Writes <study>.json, <study>-<figure>.svg and <study>.md; the JSON first, since it took hours."""
    folder.mkdir(parents=True, exist_ok=True)
    text = to_json(study)
    written = [write_file(folder / f"{study.name}.json", text)]
    study = load_study(written[0])
    drawings = draw_figures(study)
    for drawing in drawings:
        written.append(write_file(folder / figure_file(study, drawing), drawing.svg.encode()))
    return [*written, write_file(folder / f"{study.name}.md", page(study, drawings).encode())]


def to_json(study: Study) -> bytes:
    """Indented, but for lists of numbers: a point of a curve is one line."""
    text = msgspec.json.format(msgspec.json.encode(study), indent=1)
    return re.sub(rb'\[\n([^][{}"]*)\n *\]', lambda found: b"[" + b" ".join(found[1].split()) + b"]", text) + b"\n"


def load_study(path: Path) -> Study:
    try:
        return read_json(path, Study)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} is not there; `megabatch study` writes it") from None
    except Undecodable as error:
        raise UserError(
            f"{str(path)!r} is not the JSON of a study: {error}; move it away, and `megabatch study` makes it again"
        ) from None


def page(study: Study, drawings: Sequence[Drawing]) -> str:
    figures = {drawing.name: figure_link(study, drawing) for drawing in drawings}
    parts = [
        f"# {study.title}",
        study.question,
        progress(study),
        answers(study),
        f"Printed by `{study.command}`; every value of every seed is in [{study.name}.json]({study.name}.json).",
        accuracy_table(study),
        PAIRED_NOTE if study.paired else NOTE,
        figures.pop("accuracy", ""),
    ]
    if any(arm.tuned for arm in study.arms):
        parts += ["## Learning rates", figures.pop("search", ""), search_table(study), edges(study)]
    if names := curve_names(study):
        parts.append("## Over the epochs")
        for name in names:
            parts += [figures.pop(slug(name), ""), curve_table(study, name)]
    assert not figures, f"no place on the page for {list(figures)}"
    parts += ["## Set-up", study.setup, arm_table(study), origin(study)]
    return "\n\n".join(part for part in parts if part) + "\n"


def answers(study: Study) -> str:
    """Each criterion: whether it holds, and by what; and what others have found, beside what is found here."""
    criteria = [f"{judge(study, criterion).text}." for criterion in study.criteria]
    claims = [f"{claim.text} Here {judge_claim(study, claim).text}." for claim in study.claims]
    curve_claims = [f"{claim.text} Here {judge_curves(study, claim).text}." for claim in study.curve_claims]
    return bullets([capital(line) for line in [*criteria, *claims, *curve_claims]])


def capital(line: str) -> str:
    """Of what is said "so far"; the name of an arm stays as it is."""
    return line[0].upper() + line[1:] if line.startswith("so far ") else line


def progress(study: Study) -> str:
    if study.num_runs >= study.num_planned:
        return ""
    return (
        f"**{study.num_runs} of {study.num_planned} runs have been made**: what follows is about these alone, and "
        "nothing is judged before all seeds of its arms have been run."
    )


def accuracy_table(study: Study) -> str:
    head = (
        "arm",
        "what it is",
        "learning rate",
        "mean",
        "standard deviation",
        "95 % interval",
        "gap, points",
        "diverged",
    )
    return table(head, [accuracy_row(study, arm) for arm in study.arms])


def accuracy_row(study: Study, arm: Arm) -> list[str]:
    baseline = study.baseline_of(arm)
    spread = top1_spread(arm)
    gap = top1_gap(study, arm, baseline)
    interval = spread and spread.interval
    return [
        arm.name,
        arm.about,
        point_words(arm),
        points(spread.mean) if spread else NONE,
        points(spread.deviation) if spread and spread.deviation is not None else NONE,
        range_words(interval) if interval else "one seed: none" if spread else NONE,
        "baseline" if arm is baseline else gap_words(gap) if gap else NONE,
        f"{arm.num_diverged} of {len(arm.runs)}{seeds_missing(arm)}" if arm.runs else divergence(arm),
    ]


def point_words(arm: Arm) -> str:
    if arm.learning_rate is None:
        return NONE
    return f"{arm.learning_rate:g}" + (f", momentum {arm.momentum:g}" if arm.momentum is not None else "")


def seeds_missing(arm: Arm) -> str:
    return f"; {arm.num_seeds - len(arm.runs)} to come" if arm.num_seeds > len(arm.runs) else ""


def search_table(study: Study) -> str:
    """The rates in order, each with what it reached."""
    rows = [
        [arm.name, point_words(arm) if arm.is_searched else "search under way", " · ".join(tried_words(arm))]
        for arm in study.arms
        if arm.tuned
    ]
    return table(("arm", "chosen", "rate: top-1 on held-out images, %"), rows)


def tried_words(arm: Arm) -> list[str]:
    """By momentum, and then by rate."""
    words = []
    for run in sorted(arm.tuned, key=lambda run: (run.momentum or 0.0, run.learning_rate)):
        rate = f"{run.learning_rate:g}" + (f" with {run.momentum:g}" if run.momentum is not None else "")
        word = f"{rate}: {'diverged' if run.top1 is None else points(100 * run.top1)}"
        is_chosen = arm.is_searched and (run.learning_rate, run.momentum) == (arm.learning_rate, arm.momentum)
        words.append(f"**{word}**" if is_chosen else word)
    return words


def edges(study: Study) -> str:
    found = [(arm, rate_at_edge(arm)) for arm in study.arms if arm.is_searched]
    return bullets([f"The rate of {arm.name} is {edge}." for arm, edge in found if edge])


def curve_table(study: Study, name: str) -> str:
    """Where the arms' mean curves begin and end, and how far they go."""
    rows = []
    for arm in study.arms:
        curve = [] if arm.num_diverged else mean_curve([run.curves.get(name, []) for run in arm.runs])
        values = [(value, epoch) for epoch, value in curve if value is not None]
        ends = [values[0], min(values), max(values), values[-1]] if values else []
        rows.append([arm.name, *([f"{value:.3g} at {epoch:.3g}" for value, epoch in ends] or [divergence(arm)] * 4)])
    return table((name, "first, at epoch", "lowest", "highest", "last"), rows)


def arm_table(study: Study) -> str:
    rows = []
    for arm in study.arms:
        settings = " ".join(f"`{word}`" for word in arm.settings)
        seeds = ", ".join(str(run.seed) for run in arm.runs)
        rows.append([arm.name, settings or NONE, seeds or NONE])
    return table(("arm", "settings", "seeds"), rows)


def origin(study: Study) -> str:
    if not study.num_runs:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in study.versions.items())
    return f"Run with {versions} on {study.machine}; it took {duration(study.took_s)}."


def duration(core_s: float) -> str:
    return f"{core_s / 3600:.1f} core hours" if core_s >= 3600 else f"{core_s / 60:.1f} core minutes"


def figure_file(study: Study, drawing: Drawing) -> str:
    return f"{study.name}-{drawing.name}.svg"


def figure_link(study: Study, drawing: Drawing) -> str:
    caption = drawing.caption[0].upper() + drawing.caption[1:]
    return f"![{caption}]({figure_file(study, drawing)})\n\n{caption}."


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
