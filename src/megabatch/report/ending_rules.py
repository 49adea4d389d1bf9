"""Rules of the verdict about what ended or spoilt a run."""

import math

from megabatch.report import figures
from megabatch.report.findings import Facts, Finding, Kind, Rule
from megabatch.report.thin import finite, mean
from megabatch.text import one_line

SKIPPED_WORTH = 0.01  # of steps
FEWEST_SKIPPED = 5
FEWEST_STEPS = 50  # to say that a loss does not fall
FALLEN = 0.98  # of what it was: less has fallen
LONGEST_CAUSE = 200
ENDINGS: dict[str, tuple[Kind, str, str]] = {
    "diverged": (
        "problem",
        "It diverged",
        "The loss or gradients left the numbers.{why} Lower optim.learning_rate, or lengthen schedule.warmup_epochs.",
    ),
    "failed": (
        "problem",
        "It failed",
        "It ended by an error.{why} The same command resumes from its newest checkpoint.",
    ),
    "killed": (
        "problem",
        "It was killed",
        "It wrote no summary.{why} The same command resumes from its newest checkpoint.",
    ),
    "stopped": ("limit", "It was stopped", "It was asked to stop, and saved its state. The same command resumes."),
    "running": ("limit", "It is running", "This is what there is so far."),
}


def ended_early(facts: Facts) -> Finding | None:
    view = facts.view
    if view.status not in ENDINGS:
        return None
    kind, title, advice = ENDINGS[view.status]
    causes = (entry.text.split("\n")[0] for entry in reversed(view.log) if entry.text.startswith("rank "))
    cause = next(causes, "")
    why = f" Its log says: {one_line(cause, LONGEST_CAUSE).rstrip('.')}." if cause else ""
    return Finding(kind, 0.0, f"step {view.num_steps:,}", title, advice.replace("{why}", why))


def lost_numbers(facts: Facts) -> Finding | None:
    steps, losses = facts.view.steps.of["step"], facts.view.steps.of["loss"]
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    if not bad:
        return None
    advice = (
        f"For the first time in step {bad[0]:,.0f}. Lower optim.learning_rate, lengthen schedule.warmup_epochs, or set "
        "optim.clip_norm."
    )
    return Finding("problem", 0.0, figures.plural(len(bad), "step"), "The loss was not a number", advice)


def does_not_learn(facts: Facts) -> Finding | None:
    losses = finite(facts.view.steps.of["loss"])
    if len(losses) < FEWEST_STEPS:
        return None
    tenth = len(losses) // 10
    first, last = mean(losses[:tenth]), mean(losses[-tenth:])
    if last < FALLEN * first:
        return None
    advice = "It ends where it began, or above. megabatch lr-range finds learning rates that this model can take."
    figure = f"{figures.number(first, 3)} to {figures.number(last, 3)}"
    return Finding("problem", 0.0, figure, "The loss does not fall", advice)


def overflows(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = len(view.skipped_steps)
    if skipped < FEWEST_SKIPPED or skipped < SKIPPED_WORTH * view.num_steps:
        return None
    advice = "These steps were skipped. precision.name=bf16 needs no loss scale; a lower optim.learning_rate helps too."
    return Finding("problem", 0.0, f"{skipped:,} of {view.num_steps:,} steps", "Gradients overflowed", advice)


def images_skipped(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = view.summary.skipped_images if view.summary else view.skipped_images
    if not skipped:
        return None
    advice = "Others stood in for them. metrics.jsonl names them (skipped_images); replace them in the set."
    return Finding("problem", 0.0, figures.plural(skipped, "image"), "Images could not be read", advice)


ENDING_RULES: tuple[Rule, ...] = (ended_early, lost_numbers, does_not_learn, overflows, images_skipped)
