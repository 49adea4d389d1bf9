"""The files of a study: JSON, plots and a Markdown page.  Plots and page are computed from the JSON."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megabatch.errors import UserError
from megabatch.experiments.batch_limit import answer_lines, target_rows
from megabatch.experiments.evidence import Arm, Study, slug
from megabatch.experiments.plots import Plot, curve_names, draw_plots, mean_curve
from megabatch.experiments.verdict import (
    divergence,
    gap_words,
    judge,
    judge_claim,
    judge_curves,
    judge_published,
    points,
    range_words,
    rate_at_edge,
    top1_gap,
    top1_spread,
)
from megabatch.io.disk import write_file
from megabatch.io.reading import Undecodable, read_json

NONE = "-"


def write_study(study: Study, folder: Path) -> list[Path]:
    """Write <study>.json, <study>-<plot>.svg and <study>.md; the JSON first, since it took hours."""
    folder.mkdir(parents=True, exist_ok=True)
    text = to_json(study)
    written = [write_file(folder / f"{study.name}.json", text)]
    study = load_study(written[0])
    plots = draw_plots(study)
    for plot in plots:
        written.append(write_file(folder / plot_file(study, plot), plot.svg.encode()))
    return [*written, write_file(folder / f"{study.name}.md", page(study, plots).encode())]


def to_json(study: Study) -> bytes:
    """Return indented JSON with lists of numbers, such as points of curves, on one line."""
    text = msgspec.json.format(msgspec.json.encode(study), indent=1)
    return re.sub(rb'\[\n([^][{}"]*)\n *\]', lambda found: b"[" + b" ".join(found[1].split()) + b"]", text) + b"\n"


def load_study(path: Path) -> Study:
    try:
        return read_json(path, Study)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} does not exist; `megabatch study` writes it") from None
    except Undecodable as error:
        raise UserError(
            f"{str(path)!r} is not the JSON of a study: {error}; delete it and run `megabatch study` again"
        ) from None


def page(study: Study, plots: Sequence[Plot]) -> str:
    links = {plot.name: plot_link(study, plot) for plot in plots}
    parts = [
        f"# {study.title}",
        study.question,
        progress(study),
        answers(study),
        f"Printed by `{study.command}`; every value of every seed is in [{study.name}.json]({study.name}.json).",
        accuracy_table(study),
        note(study),
        links.pop("accuracy", ""),
        table(rows[0], rows[1:]) if (rows := target_rows(study)) else "",
        links.pop("epochs", ""),
    ]
    if any(arm.tuned for arm in study.arms):
        parts += ["## Learning rates", links.pop("search", ""), search_table(study), edges(study)]
    if names := curve_names(study):
        parts.append("## Over the epochs")
        for name in names:
            parts += [links.pop(slug(name), ""), curve_table(study, name)]
    assert not links, f"plots that are not on the page: {list(links)}"
    parts += ["## Setup", study.setup, arm_table(study), origin(study)]
    return "\n\n".join(part for part in parts if part) + "\n"


def answers(study: Study) -> str:
    """Return whether each criterion holds, and each published result with the result of this study."""
    criteria = [f"{judge(study, criterion).text}." for criterion in study.criteria]
    claims = [f"{claim.text} Here {judge_claim(study, claim).text}." for claim in study.claims]
    curve_claims = [f"{claim.text} Here {judge_curves(study, claim).text}." for claim in study.curve_claims]
    limits = [f"{line[0].upper()}{line[1:]}." for line in answer_lines(study)]
    published = [f"{judge_published(arm).text}." for arm in study.arms if arm.published is not None]
    return bullets([capital(line) for line in [*criteria, *published, *claims, *curve_claims, *limits]])


def capital(line: str) -> str:
    """Capitalise "so far"; the name of an arm keeps its case."""
    return line[0].upper() + line[1:] if line.startswith("so far ") else line


def progress(study: Study) -> str:
    if study.num_runs >= study.num_planned:
        return ""
    return (
        f"**{study.num_runs} of {study.num_planned} runs are complete.** This page covers only these runs; an arm is "
        "not judged until all its seeds are complete."
    )


def note(study: Study) -> str:
    """Return the explanation of the table, without the parts that do not apply to this study."""
    gaps = (
        "gaps are paired by seed, between runs that start with the same weights" if study.paired else "for gaps Welch's"
    )
    are_several, are_searched = len(study.arms) > 1, any(arm.tuned for arm in study.arms)
    return (
        "Top-1 in %. Intervals contain the mean over seeds with 95 % confidence (Student's t"
        + f"; {gaps}" * are_several
        + "). They are about the choice of seeds, not of test images"
        + " or of the learning rate, which was chosen with one seed" * are_searched
        + "."
        + " A gap is in points below the baseline; a negative gap is above it." * are_several
        + " An arm with a diverged seed has no mean."
    )


def accuracy_table(study: Study) -> str:
    head = (
        "arm",
        "description",
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
        range_words(interval) if interval else "none: one seed" if spread else NONE,
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
    """Return the learning rates that were tried and the top-1 of each."""
    rows = [
        [arm.name, point_words(arm) if arm.is_searched else "search in progress", " · ".join(tried_words(arm))]
        for arm in study.arms
        if arm.tuned
    ]
    return table(("arm", "chosen", "rate: top-1 on held-out images, %"), rows)


def tried_words(arm: Arm) -> list[str]:
    """Return results in order of momentum and learning rate."""
    words = []
    for run in sorted(arm.tuned, key=lambda run: (run.momentum or 0.0, run.learning_rate)):
        rate = f"{run.learning_rate:g}" + (f" with {run.momentum:g}" if run.momentum is not None else "")
        word = f"{rate}: {'diverged' if run.top1 is None else points(100 * run.top1)}"
        is_chosen = arm.is_searched and (run.learning_rate, run.momentum) == (arm.learning_rate, arm.momentum)
        words.append(f"**{word}**" if is_chosen else word)
    return words


def edges(study: Study) -> str:
    found = [(arm, rate_at_edge(arm)) for arm in study.arms if arm.is_searched]
    return bullets([f"The learning rate of {arm.name} is {edge}." for arm, edge in found if edge])


def curve_table(study: Study, name: str) -> str:
    """Return the first, lowest, highest and last value of each arm's mean curve."""
    rows = []
    for arm in study.arms:
        curve = [] if arm.num_diverged else mean_curve([run.curves.get(name, []) for run in arm.runs])
        values = [(value, epoch) for epoch, value in curve if value is not None]
        ends = [values[0], min(values), max(values), values[-1]] if values else []
        rows.append([arm.name, *([f"{shown(value)} at {epoch:.3g}" for value, epoch in ends] or [divergence(arm)] * 4)])
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
    return f"Run with {versions} on {study.machine}; total {core_time(study.took_s)}."


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def core_time(core_s: float) -> str:
    return f"{core_s / 3600:.1f} core hours" if core_s >= 3600 else f"{core_s / 60:.1f} core minutes"


def plot_file(study: Study, plot: Plot) -> str:
    return f"{study.name}-{plot.name}.svg"


def plot_link(study: Study, plot: Plot) -> str:
    caption = plot.caption[0].upper() + plot.caption[1:]
    return f"![{caption}]({plot_file(study, plot)})\n\n{caption}."


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
