"""The report page: one self-contained HTML file.

Its Content-Security-Policy allows only the page's own style and script, by their hashes, and embedded pictures.  The
browser runs and fetches nothing else, even if a run's records contain markup.
"""

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from megabatch import __version__
from megabatch.errors import UserError
from megabatch.io import numbers as fmt
from megabatch.io.disk import remedy, write_file
from megabatch.report import learning
from megabatch.report.classes import class_charts, pictures
from megabatch.report.communication import bucket_table, pipeline_chart, plan_facts
from megabatch.report.events import RunEvent, event_chart, events_of, marked
from megabatch.report.html import Child, Markup, raw, tag
from megabatch.report.overlay import overlay
from megabatch.report.settings import environment_block, recipe_block
from megabatch.report.stragglers import rank_charts
from megabatch.report.svg import grid, section
from megabatch.report.time_charts import mean_table, over_time_chart, sizes_table, summary_bar
from megabatch.report.verdict import Finding, findings_of, headline
from megabatch.report.view import RunView, read_run

NAME = "report.html"
MOST_RUNS = 50
TITLES = {  # of sections, in their order
    "verdict": "Verdict",
    "learning": "Learning",
    "time": "Where the time goes",
    "communication": "Communication",
    "ranks": "Stragglers",
    "events": "Resumes and failures",
    "classes": "Mistakes",
    "settings": "Recipe and environment",
}


@cache
def read_asset(name: str) -> str:
    return (resources.files("megabatch.report") / name).read_text("utf-8")


def sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_of(views: Sequence[RunView]) -> str:
    return one_run(views[0]) if len(views) == 1 else several(views)


def document(title: str, *body: Child) -> str:
    style, script = read_asset("report.css"), read_asset("report.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{sha256(style)}'; script-src '{sha256(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"megabatch {__version__}"),
        tag("title", title),
        raw("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body, raw('script', script)), lang='en')}\n"


def one_run(view: RunView) -> str:
    findings, events = findings_of(view), events_of(view)
    sections = {
        "verdict": verdict_section(view, findings),
        "learning": learning_section(view, events),
        "time": time_section(view, events),
        "communication": communication_section(view),
        "ranks": section("ranks", TITLES["ranks"], rank_charts(view)),
        "events": section("events", TITLES["events"], event_chart(view, events)),
        "classes": section("classes-section", TITLES["classes"], grid(*class_charts(view)), pictures(view)),
        "settings": section("settings", TITLES["settings"], recipe_block(view), environment_block(view)),
    }
    found = {key: content for key, content in sections.items() if content is not None}
    links = [(("classes-section" if key == "classes" else key), TITLES[key]) for key in found]
    return document(
        f"{view.name}: megabatch report",
        header(view.name, facts_of(view), links),
        tag("main", *found.values(), notes(view.notes), id="main"),
        footer(),
    )


def several(views: Sequence[RunView]) -> str:
    sections = [part for part in overlay(views) if part is not None]
    names = [view.name for view in views]
    damaged = [f"{view.name}: {note}" for view in views for note in view.notes]
    return document(
        f"{len(views)} runs: megabatch report",
        header(f"{len(views)} runs", names, []),
        tag("main", *sections, notes(damaged), id="main"),
        footer(),
    )


def header(title: str, facts: Sequence[str], links: Sequence[tuple[str, str]]) -> Markup:
    navigation = tag("nav", *(tag("a", name, href=f"#{key}") for key, name in links[1:]), aria_label="Sections")
    return tag(
        "header",
        tag("p", "megabatch report", class_="brand"),
        tag("h1", title),
        tag("ul", *(tag("li", fact) for fact in facts), class_="facts"),
        navigation if links else None,
    )


def facts_of(view: RunView) -> list[str]:
    setting = view.setting
    on_nodes = f" on {fmt.plural(view.tuning.topology.num_nodes, 'node')}" if view.tuning else ""
    facts = [
        view.status,
        f"recipe {view.recipe}" if view.recipe else None,
        str(setting("model.name")) if setting("model.name") else None,
        f"global batch {view.global_batch:,}" if view.global_batch else None,
        str(setting("precision.name")) if setting("precision.name") else None,
        fmt.plural(view.num_ranks, "rank") + on_nodes if view.num_ranks else None,
        view.written,
    ]
    return [fact for fact in facts if fact]


def verdict_section(view: RunView, findings: Sequence[Finding]) -> Markup | None:
    cards = [
        tag(
            "li",
            tag("div", tag("b", found.value, class_="value"), class_="measure"),
            tag("div", tag("h3", found.title), tag("p", found.advice)),
            class_=f"finding {found.kind}",
        )
        for found in findings
    ]
    return tag(
        "section",
        tag("h2", headline(view, findings), id="verdict-heading", class_="headline"),
        tiles(view),
        summary_bar(view),
        tag("ul", *cards, class_="findings") if cards else None,
        id="verdict",
        aria_labelledby="verdict-heading",
    )


def tiles(view: RunView) -> Markup:
    """Return the main results: accuracy, times, throughput and steps."""
    last, summary = view.last_evaluation, view.summary
    best = max(view.evaluations.of["top1"], default=0.0)
    rate = summary.images_per_s if summary else None
    epochs = f"{fmt.number(view.last_step.epoch, 3)} epochs" if view.last_step else ""
    rows: list[tuple[str, str, str]] = []
    if last and last.mean_average_precision is not None:
        rows.append(("mAP", fmt.accuracy(last.mean_average_precision), "mean average precision"))
    if last:
        rows.append(("top-1", fmt.accuracy(last.top1), f"best {fmt.accuracy(best)}" if best > last.top1 else ""))
    if view.wall_s:
        rows.append(("wall time", fmt.duration(view.wall_s), "training and evaluation"))
    if rate:
        rows.append(("images/s", fmt.count(rate), "in training steps"))
    rows.append(("steps", fmt.count(view.num_steps), epochs))
    target = view.setting("train.target_top1")
    if isinstance(target, float) and summary:
        reached = fmt.duration(summary.time_to_target_s) if summary.time_to_target_s is not None else "not reached"
        rows.append(("time to target", reached, f"top-1 of {fmt.percent(target, 1)}"))
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value), tag("dd", more, class_="more") if more else None)
            for name, value, more in rows
        ),
        class_="tiles",
    )


def time_section(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    return section(
        "time", TITLES["time"], over_time_chart(view, marked(list(events))), mean_table(view), sizes_table(view)
    )


def learning_section(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    marks = marked(list(events))
    charts = (
        learning.loss_chart,
        learning.accuracy_chart,
        learning.learning_rate_chart,
        learning.throughput_chart,
        learning.noise_chart,
        learning.loss_scale_chart,
        learning.memory_chart,
    )
    about = "Vertical lines mark resumes and, in red, failures." if marks else None
    return section("learning", TITLES["learning"], grid(*(chart(view, marks) for chart in charts)), about=about)


def communication_section(view: RunView) -> Markup | None:
    about = plan_facts(view.tuning) if view.tuning and view.tuning.topology.num_ranks > 1 else None
    return section("communication", TITLES["communication"], pipeline_chart(view), bucket_table(view), about=about)


def notes(texts: Sequence[str]) -> Markup | None:
    if not texts:
        return None
    return tag("section", tag("h2", "Unreadable files"), tag("ul", *(tag("li", text) for text in texts)))


def footer() -> Markup:
    text = f"Written by megabatch {__version__} from the records in the run's folder. This page loads nothing."
    return tag("footer", tag("p", text), tag("div", role="status", aria_live="polite", id="tip", hidden=True))


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one or several runs and return its path.

    By default the report of one run is in its folder, and that of several in the current folder.  It is readable only
    by its owner, as are the other files of a run, since it shows images and paths.
    """
    if len(paths) > MOST_RUNS:
        raise UserError(f"{len(paths)} runs; a page can show at most {MOST_RUNS}; pass fewer runs")
    paths = list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]  # each once
    views = [read_run(path) for path in paths]
    if out is None:
        out = paths[0] / NAME if len(paths) == 1 else Path(NAME)
    try:
        return write_file(out, page_of(views), is_private=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}; {remedy(error)}, or pass --out") from None
