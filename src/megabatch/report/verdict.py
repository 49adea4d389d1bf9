"""What limited a run and what to change, in words, each with the figure behind it.

Every rule looks at one thing and says something or nothing.  What ended or spoilt a run comes first, then what took
its time, the most first; where nothing of that is worth a change, compute is what is left, which is good.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from megabatch.report import numbers as figures
from megabatch.report.view import COMPUTE, DATA, STAGES, RunView, Seconds, excess_s, finite, mean, shares_of
from megabatch.text import one_line

# What a rule of the verdict says of a run, and what it looks at.

Kind = Literal["problem", "limit", "good"]
WORTH = 0.05  # of the wall time, from which on a change is worth it
LIMITS = 0.10  # from which on it limits the run


class Finding(NamedTuple):
    kind: Kind
    share: float  # of the wall time that it is about; 0: it is about none
    figure: str
    title: str
    advice: str


class Facts(NamedTuple):
    view: RunView
    shares: Seconds

    def share(self, *keys: str) -> float:
        return math.fsum(self.shares.get(key, 0.0) for key in keys)


Rule = Callable[[Facts], Finding | None]


def takes_time(kind: Kind, share: float, title: str, advice: str) -> Finding:
    return Finding(kind, share, f"{figures.percent(share)} of the time", title, advice)


def saving(share: float, what: str = "it") -> str:
    return f"without {what} the run would be {1 / (1 - min(share, 0.95)):.2f} times as fast"


# Rules of the verdict about what took the time of a run.

LONGEST_SOURCE = 60
UNEXPLAINED = 3.0  # times what was predicted
MOSTLY = 0.5
IN_MEMORY = ("fashion-mnist", "synthetic")  # sources that are not packed: their images are arrays


def input_waits(facts: Facts) -> Finding | None:
    share = facts.share(*DATA)
    if share < WORTH:
        return None
    stages = {stage: facts.share(stage) for stage in STAGES}
    stage = max(stages, key=stages.__getitem__)
    told = f"Of that, {figures.percent(stages[stage] / share)} was {stage}; " if stages[stage] else "In all, "
    advice = f"{told}{saving(share)}. {input_advice(facts.view, stage)}"
    return takes_time("limit", share, "Waiting for images", advice)


def input_advice(view: RunView, stage: str) -> str:
    source, size = view.setting("data.source"), view.setting("data.image_size")
    shown = one_line(source, LONGEST_SOURCE) if isinstance(source, str) else "SOURCE"
    threads = "give each rank more run.decode_threads, if cores are idle"
    if shown.startswith(IN_MEMORY) or shown.endswith(".npz"):
        return f"{threads[0].upper()}{threads[1:]}."
    shorter = f" --shorter-side {-(-8 * size // 7)}" if isinstance(size, int) else ""
    pack = f"megabatch pack {shown} OUT"
    return {
        "decode": f"Decode less: {pack}{shorter}, then data.source=OUT. Or {threads}.",
        "read": f"Few large files are read faster: {pack}, then data.source=OUT, on a local disk.",
        "augment": f"Crop from smaller images: {pack}{shorter}, then data.source=OUT. Or {threads}.",
        "copy": "Copies to the device were not hidden: a larger batch.micro makes fewer of them.",
    }[stage]


def comm_waits(facts: Facts) -> Finding | None:
    share = facts.share("comm")
    if share < WORTH:
        return None
    about = f"Rank 0 waited for other ranks and the network after its own backward; {saving(share)}."
    return takes_time("limit", share, "Exposed communication", f"{about} {comm_advice(facts)}")


def comm_advice(facts: Facts) -> str:
    view, tuning = facts.view, facts.view.tuning
    exposed_s = facts.share("comm") * view.wall_s
    ordered = view.ranks.by_delay()
    if ordered and ordered[0].rank and excess_s(view.ranks) > MOSTLY * exposed_s:
        return f"Most of it was for rank {ordered[0].rank:,}, and not for the network: see the stragglers."
    advice = []
    if tuning and view.num_steps:
        took, predicted = figures.milliseconds(exposed_s / view.num_steps), figures.milliseconds(tuning.exposed_s)
        advice.append(f"It was {took} a step, where {tuning.algorithms} was predicted to expose {predicted}.")
        if exposed_s / view.num_steps > UNEXPLAINED * tuning.exposed_s:
            advice.append(
                "That is more than the links as they were measured explain: either steps are not equally long on all "
                "ranks (see what else their hosts do, and whether threads share cores), or the links became slower."
            )
    if tuning and tuning.topology.num_nodes > 1 and view.setting("comm.dtype") == "fp32":
        advice.append("comm.dtype=bf16 halves the bytes between hosts.")
    if view.setting("comm.algorithm") not in (None, "auto"):
        advice.append("comm.algorithm=auto chooses for each bucket by measurement.")
    advice.append("A larger batch.global with the same batch.micro computes more between all-reduces.")
    return " ".join(advice)


def straggler(facts: Facts) -> Finding | None:
    """By the waits of all ranks, which an evaluation records; before the first, steps name one rank."""
    view = facts.view
    ordered = view.ranks.by_delay()
    if ordered:
        rank, delay_s, num_steps = ordered[0].rank, excess_s(view.ranks), view.ranks.num_steps
    elif view.ranks.straggler:
        rank, each_s = view.ranks.straggler
        delay_s, num_steps = each_s * view.num_steps, view.num_steps
    else:
        return None
    share = min(1.0, delay_s / view.wall_s) if view.wall_s > 0 else 0.0
    if share < WORTH:
        return None
    each = f", {figures.milliseconds(delay_s / num_steps)} a step" if num_steps else ""
    advice = (
        f"It delayed the others by {figures.seconds(delay_s)} more than a usual rank did{each}. See what else runs on "
        "its host, whether that clocks down, and whether its disk is slower."
    )
    return takes_time("limit", share, f"Waiting for rank {rank:,}", advice)


def evaluates_often(facts: Facts) -> Finding | None:
    share, view = facts.share("evaluation"), facts.view
    if share < LIMITS:
        return None
    every = view.setting("train.evaluate_every")
    times = max(2, math.ceil(share / (1.0001 - share) / WORTH))
    fewer = (every if isinstance(every, int) and every else 1) * times
    told = f"{figures.plural(len(view.evaluations), 'evaluation')}; {saving(share, 'them')}."
    advice = f"train.evaluate_every={fewer} brings them to about {figures.percent(WORTH)}."
    if len(view.evaluations) < 2 * times:
        advice = "train.evaluate_every=0 leaves that after the last epoch alone."
    return takes_time("limit", share, "Evaluations", f"{told} {advice}")


def held_by_checkpoints(facts: Facts) -> Finding | None:
    share = facts.share("checkpoint")
    if share < WORTH:
        return None
    saves, told = facts.view.summary.saves if facts.view.summary else None, "In all, "
    if saves:
        longest = figures.seconds(saves.longest_stall_s)
        told = f"{figures.plural(saves.count, 'checkpoint')}, the longest held training for {longest}; "
    advice = "Write them less often (checkpoint.every_steps, checkpoint.every_minutes), or to a faster disk."
    return takes_time("limit", share, "Checkpoints", f"{told}{saving(share, 'them')}. {advice}")


def other_time(facts: Facts) -> Finding | None:
    share = facts.share("other")
    if share < LIMITS:
        return None
    advice = (
        "It is neither training, evaluation nor a checkpoint. Where steps are this short, records and the screen cost "
        "as much: a larger batch.global takes fewer steps."
    )
    return takes_time("limit", share, "Other work", advice)


def computes(facts: Facts) -> Finding | None:
    """The good case."""
    share, waits = facts.share(*COMPUTE), facts.share(*DATA, "comm")
    if share < MOSTLY or waits >= LIMITS:
        return None
    rest = "nothing to gain from input or network" if waits < WORTH else f"waits are {figures.percent(waits)}"
    advice = f"Rank 0 computed; {rest}. Faster from here: more ranks, a lower precision.name, or model.compile=true."
    return takes_time("good", share, "Compute", advice)


TIME_RULES: tuple[Rule, ...] = (
    input_waits,
    comm_waits,
    straggler,
    evaluates_often,
    held_by_checkpoints,
    other_time,
)

# Rules of the verdict about what ended or spoilt a run.

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

MUCH = 0.25  # of the wall time, from which on it comes before compute
BEGINNINGS = {
    "diverged": "This run diverged. ",
    "failed": "This run failed. ",
    "killed": "This run was killed. ",
    "stopped": "This run was stopped. ",
    "running": "This run is not over. ",
}


def findings_of(view: RunView) -> list[Finding]:
    facts = Facts(view, shares_of(view.times.totals()))
    endings = [found for rule in ENDING_RULES if (found := rule(facts))]
    times = [found for rule in TIME_RULES if (found := rule(facts))]
    good = computes(facts)
    return [*endings, *sorted(times, key=lambda found: -found.share), *([good] if good else [])]


def headline(view: RunView, findings: Sequence[Finding]) -> str:
    """One or two sentences."""
    if not view.num_steps:
        return "This run has not taken a step."
    begin = BEGINNINGS.get(view.status, "")
    verb = "limits" if view.status == "running" else "limited"
    computed = Facts(view, shares_of(view.times.totals())).share(*COMPUTE)
    limit = max((found for found in findings if found.kind == "limit"), key=lambda found: found.share, default=None)
    if limit and limit.share >= LIMITS:
        if limit.share >= MUCH or limit.share > computed:
            return f"{begin}{limit.title} {verb} this run: {limit.figure}."
        what = limit.title[0].lower() + limit.title[1:]
        return (
            f"{begin}{figures.percent(computed)} of the time was compute; {what} took {figures.percent(limit.share)}."
        )
    if computed:
        return f"{begin}Compute {verb} this run, as it should: {figures.percent(computed)} of the time."
    return begin.strip() or "Nothing by itself limited this run."
