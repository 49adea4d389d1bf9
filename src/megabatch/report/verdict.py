"""Findings about a run: its bottlenecks and the settings to change, each with a measured value.

Every rule checks one thing and returns a finding or None.  Findings about the end of a run come first, then findings
about its accuracy, then findings about its time in order of their share.  If nothing else is worth changing, compute is
the limit, which is good.
"""

import math
from collections.abc import Callable, Sequence
from shlex import quote
from statistics import median
from typing import Literal, NamedTuple

from megabatch.io import numbers as fmt
from megabatch.report.view import COMPUTE, DATA, STAGES, RunView, Seconds, excess_s, finite, mean, shares_of
from megabatch.runs.records import GpuUse, Slowdown
from megabatch.text import one_line

Kind = Literal["problem", "limit", "good"]
WORTH = 0.05  # a share of the wall time that is worth a change
LIMITS = 0.10  # a share that limits the run


class Finding(NamedTuple):
    kind: Kind
    share: float  # of the wall time; 0 for findings that are not about time
    value: str
    title: str
    advice: str


class Facts(NamedTuple):
    view: RunView
    shares: Seconds

    def share(self, *keys: str) -> float:
        return math.fsum(self.shares.get(key, 0.0) for key in keys)


Rule = Callable[[Facts], Finding | None]


def takes_time(kind: Kind, share: float, title: str, advice: str) -> Finding:
    return Finding(kind, share, f"{fmt.percent(share)} of the time", title, advice)


def saving(share: float, what: str = "it") -> str:
    return f"without {what} the run would be {1 / (1 - min(share, 0.95)):.2f} times as fast"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# Rules about the time of a run.

LONGEST_SOURCE = 60
UNEXPLAINED = 3.0  # measured over predicted communication
MOSTLY = 0.5
IN_MEMORY = ("fashion-mnist", "synthetic")  # sources of arrays, which cannot be packed


def input_waits(facts: Facts) -> Finding | None:
    share = facts.share(*DATA)
    if share < WORTH:
        return None
    stages = {stage: facts.share(stage) for stage in STAGES}
    stage = max(stages, key=stages.__getitem__)
    detail = f"{fmt.percent(stages[stage] / share)} of the wait was for {stage}; " if stages[stage] else ""
    advice = f"{sentence(detail + saving(share))} {input_advice(facts.view, stage)}"
    return takes_time("limit", share, "Waiting for images", advice)


def input_advice(view: RunView, stage: str) -> str:
    source, size = view.setting("data.source"), view.setting("data.image_size")
    shown = one_line(source, LONGEST_SOURCE) if isinstance(source, str) else "SOURCE"
    threads = "raise run.decode_threads if cores are idle"
    if shown.startswith(IN_MEMORY) or shown.endswith(".npz"):
        return sentence(threads)
    shorter = f" --shorter-side {-(-8 * size // 7)}" if isinstance(size, int) else ""
    pack = f"megabatch pack {quote(shown)} OUT"
    return {
        "decode": f"Store smaller images: {pack}{shorter}, then train with data.source=OUT. Or {threads}.",
        "read": f"Read a few large files from a local disk: {pack}, then train with data.source=OUT.",
        "augment": f"Crop from smaller images: {pack}{shorter}, then train with data.source=OUT. Or {threads}.",
        "copy": "Copies to the device were not hidden. Raise batch.micro for fewer copies.",
    }[stage]


def comm_waits(facts: Facts) -> Finding | None:
    share = facts.share("comm")
    if share < WORTH:
        return None
    about = f"Rank 0 waited for other ranks and the network after its backward; {saving(share)}."
    return takes_time("limit", share, "Exposed communication", f"{about} {comm_advice(facts)}")


def comm_advice(facts: Facts) -> str:
    view, tuning = facts.view, facts.view.tuning
    exposed_s = facts.share("comm") * view.wall_s
    ordered = view.ranks.by_delay()
    if ordered and ordered[0].rank and excess_s(view.ranks) > MOSTLY * exposed_s:
        return f"Most of the wait was for rank {ordered[0].rank:,}, not for the network: see Stragglers."
    advice = []
    if tuning and view.num_steps:
        took, predicted = fmt.milliseconds(exposed_s / view.num_steps), fmt.milliseconds(tuning.exposed_s)
        advice.append(f"It took {took} per step; {tuning.algorithms} was predicted to expose {predicted}.")
        if exposed_s / view.num_steps > UNEXPLAINED * tuning.exposed_s:
            advice.append(
                "The measured links do not explain this. Either steps take longer on some ranks (check for other "
                "processes on their hosts and for threads that share cores), or the links became slower."
            )
    if tuning and tuning.topology.num_nodes > 1 and view.setting("comm.dtype") == "same":
        advice.append("Set comm.dtype=bf16 to halve the bytes between nodes.")
    if view.setting("comm.algorithm") not in (None, "auto"):
        advice.append("Set comm.algorithm=auto to choose the algorithm of each bucket by measurement.")
    advice.append("Raise batch.global with the same batch.micro for more compute between all-reduces.")
    return " ".join(advice)


def straggler(facts: Facts) -> Finding | None:
    """Use the waits of all ranks, which evaluations record.  Before the first evaluation, steps name one rank."""
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
    each = f", {fmt.milliseconds(delay_s / num_steps)} per step" if num_steps else ""
    cause = slow_gpu(view.ranks.gpus, rank)
    check = cause or "Check its host for other processes, lower clocks and a slower disk."
    advice = f"It delayed the other ranks by {fmt.duration(delay_s)} more than the median rank did{each}. {check}"
    return takes_time("limit", share, f"Waiting for rank {rank:,}", advice)


SLOWED = 0.05  # share of the time in which a GPU's clock was lowered
LOWER_CLOCK = 0.95  # of the median of the other GPUs
REMEDIES: dict[Slowdown, str] = {
    "heat": "Check the cooling of its host.",
    "power brake": "Check the power supply of its host.",
    "hardware slowdown": "Check the cooling and the power supply of its host.",
    "power cap": "Compare its power limit with that of the others (nvidia-smi -q -d POWER).",
}


def slow_gpu(gpus: Sequence[GpuUse | None], rank: int) -> str:
    """Return a sentence on why this rank's GPU is slower than the others; "" if it is not, or if that is unknown.

    A power cap is normal under full load, so it is a reason only with a lower clock than that of the others.
    """
    gpu = gpus[rank] if rank < len(gpus) else None
    if gpu is None:
        return ""
    others = [other.clock_mhz for number, other in enumerate(gpus) if other and other.clock_mhz and number != rank]
    usual_mhz = median(others) if others else 0.0
    is_lower = gpu.clock_mhz is not None and gpu.clock_mhz < LOWER_CLOCK * usual_mhz
    reasons = [
        reason
        for reason, share in sorted(gpu.slowed.items(), key=lambda slowed: -slowed[1])
        if share >= SLOWED and (is_lower or reason != "power cap")
    ]
    if not is_lower and not reasons:
        errors = fmt.plural(gpu.xid_errors, "critical error")
        return f"Its GPU reported {errors} (Xid): see dmesg." if gpu.xid_errors else ""
    share = f", by {reasons[0]} {fmt.percent(gpu.slowed[reasons[0]])} of the time" if reasons else ""
    clock = f": {gpu.clock_mhz:,.0f} MHz, the others {usual_mhz:,.0f}" if is_lower else ""
    remedy = REMEDIES[reasons[0]] if reasons else "Compare its clocks with those of the others (nvidia-smi -q)."
    return f"Its GPU was throttled{share}{clock}. {remedy}"


def evaluates_often(facts: Facts) -> Finding | None:
    share, view = facts.share("evaluation"), facts.view
    if share < LIMITS:
        return None
    every = view.setting("train.evaluate_every")
    times = max(2, math.ceil(share / (1.0001 - share) / WORTH))
    fewer = (every if isinstance(every, int) and every else 1) * times
    detail = f"{fmt.plural(len(view.evaluations), 'evaluation')}; {saving(share, 'them')}."
    advice = f"Set train.evaluate_every={fewer} to reduce their share to about {fmt.percent(WORTH)}."
    if len(view.evaluations) < 2 * times:
        advice = "Set train.evaluate_every=0 to evaluate only after the last epoch."
    return takes_time("limit", share, "Evaluations", f"{detail} {advice}")


def held_by_checkpoints(facts: Facts) -> Finding | None:
    share = facts.share("checkpoint")
    if share < WORTH:
        return None
    saves, detail = facts.view.summary.saves if facts.view.summary else None, ""
    if saves:
        longest = fmt.duration(saves.longest_stall_s)
        detail = f"{fmt.plural(saves.count, 'checkpoint')}; the longest stalled training for {longest}; "
    advice = "Write them less often (checkpoint.every_steps, checkpoint.every_minutes) or to a faster disk."
    return takes_time("limit", share, "Checkpoints", f"{sentence(detail + saving(share, 'them'))} {advice}")


def other_time(facts: Facts) -> Finding | None:
    share = facts.share("other")
    if share < LIMITS:
        return None
    advice = (
        "This time is neither training, evaluation nor checkpoints. With short steps, records and terminal output take "
        "a large share. Raise batch.global for fewer steps."
    )
    return takes_time("limit", share, "Other work", advice)


def computes(facts: Facts) -> Finding | None:
    share, waits = facts.share(*COMPUTE), facts.share(*DATA, "comm")
    if share < MOSTLY or waits >= LIMITS:
        return None
    rest = "A faster input or network would gain nothing" if waits < WORTH else f"Waits are {fmt.percent(waits)}"
    advice = f"{rest}. For more speed, use more ranks, a lower precision.name, or model.compile=true."
    return takes_time("good", share, "Compute", advice)


TIME_RULES: tuple[Rule, ...] = (
    input_waits,
    comm_waits,
    straggler,
    evaluates_often,
    held_by_checkpoints,
    other_time,
)

# Rules about the end of a run and its results.

SKIPPED_WORTH = 0.01  # of steps
FEWEST_SKIPPED = 5
FEWEST_STEPS = 50  # needed to judge whether the loss falls
LONGEST_CAUSE = 200
RESUMES = "The same command resumes from its newest checkpoint."
ENDINGS: dict[str, tuple[Kind, str, str]] = {
    "diverged": (
        "problem",
        "It diverged",
        "The loss or a gradient was not finite.{why} Lower optim.learning_rate, or raise schedule.warmup_epochs.",
    ),
    "failed": ("problem", "It failed", f"It ended with an error.{{why}} {RESUMES}"),
    "killed": ("problem", "It was killed", f"It wrote no summary.{{why}} {RESUMES}"),
    "stopped": (
        "limit",
        "It was stopped",
        "It saved a checkpoint when it was asked to stop. The same command resumes.",
    ),
    "running": ("limit", "It is running", "This page shows the records so far."),
}


def did_not_finish(facts: Facts) -> Finding | None:
    view = facts.view
    if view.status not in ENDINGS:
        return None
    kind, title, advice = ENDINGS[view.status]
    causes = (entry.text.split("\n")[0] for entry in reversed(view.log) if entry.text.startswith("rank "))
    cause = next(causes, "")
    why = f" Its log has: {one_line(cause, LONGEST_CAUSE).rstrip('.')}." if cause else ""
    return Finding(kind, 0.0, f"step {view.num_steps:,}", title, advice.replace("{why}", why))


def ended_early(facts: Facts) -> Finding | None:
    view = facts.view
    if view.summary is None or view.summary.ended_early is None:
        return None
    advice = f"{one_line(view.summary.ended_early, LONGEST_CAUSE)}."
    return Finding("good", 0.0, f"step {view.num_steps:,}", "It ended early, as its settings ask", advice)


def lost_numbers(facts: Facts) -> Finding | None:
    steps, losses = facts.view.steps.of["step"], facts.view.steps.of["loss"]
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    if not bad:
        return None
    advice = (
        f"The first such step is {bad[0]:,.0f}. Lower optim.learning_rate, raise schedule.warmup_epochs, or set "
        "optim.clip_norm."
    )
    return Finding("problem", 0.0, fmt.plural(len(bad), "step"), "The loss was not finite", advice)


def overflows(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = len(view.skipped_steps)
    if skipped < FEWEST_SKIPPED or skipped < SKIPPED_WORTH * view.num_steps:
        return None
    advice = (
        "These steps were skipped. Set precision.name=bf16, which needs no loss scale, or lower optim.learning_rate."
    )
    return Finding("problem", 0.0, f"{skipped:,} of {view.num_steps:,} steps", "Gradients overflowed", advice)


def images_skipped(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = view.summary.skipped_images if view.summary else view.skipped_images
    if not skipped:
        return None
    advice = "Other images replaced them. metrics.jsonl lists them (skipped_images); fix or remove these files."
    return Finding("problem", 0.0, fmt.plural(skipped, "image"), "Images could not be read", advice)


ENDING_RULES: tuple[Rule, ...] = (did_not_finish, ended_early, lost_numbers, overflows, images_skipped)

# Rules about the accuracy of a run.

FALLEN = 0.98  # the last loss over the first
NEAR_CHANCE = 1.5  # times the share of the largest class
ABOVE_CHANCE = 0.1  # and at most this part of the way from that share to 1: with two classes, 55 % and not 75 %
CHANGED = 0.01  # of top-1, a rise or fall that is worth a change
LAST_PART = 0.25  # of the steps
OVERFITS = 0.10  # top-1 in training minus top-1
LOW = 0.5  # top-1


def does_not_learn(facts: Facts) -> Finding | None:
    losses = finite(facts.view.steps.of["loss"])
    if len(losses) < FEWEST_STEPS:
        return None
    tenth = len(losses) // 10
    first, last = mean(losses[:tenth]), mean(losses[-tenth:])
    if last < FALLEN * first:
        return None
    advice = "Its last tenth is not below its first. Search for a learning rate with `megabatch lr-range`."
    value = f"{fmt.number(first, 3)} to {fmt.number(last, 3)}"
    return Finding("problem", 0.0, value, "The loss does not fall", advice)


def is_near_chance(facts: Facts) -> Finding | None:
    last, largest = facts.view.last_evaluation, share_of_largest_class(facts.view)
    if last is None or largest is None or facts.view.num_steps < FEWEST_STEPS:
        return None
    if last.top1 > min(NEAR_CHANCE * largest, largest + ABOVE_CHANCE * (1 - largest)):
        return None
    advice = (
        f"Always predicting the largest class would reach {fmt.percent(largest, 1)}. Search for a learning rate with "
        "`megabatch lr-range`, and check the labels."
    )
    return Finding("problem", 0.0, fmt.percent(last.top1, 1), "It is near chance", advice)


def share_of_largest_class(view: RunView) -> float | None:
    """Return the share of the test images, or that of equally large classes if their numbers are not recorded."""
    counts = view.mistakes.class_counts if view.mistakes else []
    if sum(counts):
        return max(counts) / sum(counts)
    classes = view.last_evaluation.class_top1 if view.last_evaluation else []
    return 1 / len(classes) if classes else None


def rise_at_end(view: RunView) -> float | None:
    """Return the last top-1 minus the best one before the last quarter; None without an evaluation there."""
    steps, top1s = view.evaluations.of["step"], view.evaluations.of["top1"]
    earlier = [top1 for step, top1 in zip(steps, top1s, strict=True) if step <= (1 - LAST_PART) * steps[-1]]
    return top1s[-1] - max(earlier) if earlier else None


def is_still_rising(facts: Facts) -> Finding | None:
    view, rise = facts.view, rise_at_end(facts.view)
    if view.status != "finished" or rise is None or rise <= CHANGED:
        return None
    top1s, epochs = view.evaluations.of["top1"], view.setting("train.epochs")
    if top1s[-1] < max(top1s):
        return None
    longer = f"train.epochs={fmt.number(2 * epochs)}" if isinstance(epochs, int | float) else "more train.steps"
    advice = f"Top-1 was best at the end of the run, and rose in its last quarter. Train a new run with {longer}."
    return Finding("limit", 0.0, points(rise), "It was still improving", advice)


def fell_from_best(facts: Facts) -> Finding | None:
    evaluations = facts.view.evaluations
    if not evaluations:
        return None
    steps, top1s = evaluations.of["step"], evaluations.of["top1"]
    best = max(top1s)
    if best - top1s[-1] <= CHANGED:
        return None
    advice = (
        f"It was best after step {steps[top1s.index(best)]:,.0f}, with {fmt.percent(best, 1)}. Use those weights with "
        "`--checkpoint best`. train.patience=5 ends a run that no longer improves."
    )
    return Finding("limit", 0.0, points(top1s[-1] - best), "It fell from its best", advice)


def overfits(facts: Facts) -> Finding | None:
    gap = training_gap(facts.view)
    if gap is None or gap <= OVERFITS:
        return None
    advice = (
        "Top-1 of augmented training images is higher than that of test images by this much. Use more augmentation "
        "(data.augment) or a larger optim.weight_decay, or start from pretrained weights (recipe finetune)."
    )
    return Finding("limit", 0.0, points(gap), "It overfits", advice)


def underfits(facts: Facts) -> Finding | None:
    view, gap, rise = facts.view, training_gap(facts.view), rise_at_end(facts.view)
    if gap is None or rise is None or gap > OVERFITS or rise > CHANGED:
        return None
    if max(view.evaluations.of["top1"][-1], view.training_top1 or 0.0) >= LOW:
        return None
    advice = (
        "Top-1 is low for training and test images, and no longer rises. Use a larger network (model.name), search "
        "for a higher learning rate with `megabatch lr-range`, or use less augmentation and optim.weight_decay."
    )
    return Finding("limit", 0.0, fmt.percent(view.evaluations.of["top1"][-1], 1), "It underfits", advice)


def training_gap(view: RunView) -> float | None:
    """Return top-1 in training minus top-1, at the last evaluation; None if one of them is missing."""
    if view.last_evaluation is None or view.training_top1 is None:
        return None
    return view.training_top1 - view.last_evaluation.top1


def points(change: float) -> str:
    return f"{100 * change:+.1f} points"


NOT_LEARNING: tuple[Rule, ...] = (does_not_learn, is_near_chance)  # the first of them, and then no other
ACCURACY_RULES: tuple[Rule, ...] = (fell_from_best, overfits, underfits, is_still_rising)


def accuracy_findings(facts: Facts) -> list[Finding]:
    stuck = [found for rule in NOT_LEARNING if (found := rule(facts))]
    return stuck[:1] or [found for rule in ACCURACY_RULES if (found := rule(facts))]


def accuracy_sentences(facts: Facts) -> str:
    """Return sentences on the accuracy and the first finding about it."""
    view, found = facts.view, accuracy_findings(facts)
    last, training = view.last_evaluation, view.training_top1
    in_training = "" if training is None else f" ({fmt.percent(training)} in training)"
    reached = f"It reached {fmt.percent(last.top1, 1)} top-1{in_training}. " if last else ""
    return reached + (f"{found[0].title}. " if found else "")


MUCH = 0.25  # a share of the wall time that the headline names before compute


def findings_of(view: RunView) -> list[Finding]:
    facts = Facts(view, shares_of(view.times.totals()))
    endings = [found for rule in ENDING_RULES if (found := rule(facts))]
    times = [found for rule in TIME_RULES if (found := rule(facts))]
    good = computes(facts)
    return [
        *endings,
        *accuracy_findings(facts),
        *sorted(times, key=lambda found: -found.share),
        *([good] if good else []),
    ]


def headline(view: RunView, findings: Sequence[Finding]) -> str:
    """Return a few sentences: how the run ended, its accuracy, and its bottleneck."""
    if not view.num_steps:
        return "This run has not taken a step."
    begin = f"This run{ENDINGS[view.status][1].removeprefix('It')}. " if view.status in ENDINGS else ""
    facts = Facts(view, shares_of(view.times.totals()))
    begin += accuracy_sentences(facts)
    verb = "limits" if view.status == "running" else "limited"
    computed = facts.share(*COMPUTE)
    limit = max((found for found in findings if found.kind == "limit"), key=lambda found: found.share, default=None)
    if limit and limit.share >= LIMITS:
        if limit.share >= MUCH or limit.share > computed:
            return f"{begin}{limit.title} {verb} this run: {limit.value}."
        what = limit.title[0].lower() + limit.title[1:]
        return f"{begin}{fmt.percent(computed)} of the time was compute; {what} took {fmt.percent(limit.share)}."
    if computed:
        return f"{begin}Compute {verb} this run, as it should: {fmt.percent(computed)} of the time."
    return begin.strip() or "No single cause limited this run."
