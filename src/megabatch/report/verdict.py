"""What limited a run and what to change, in words, each with the figure behind it.

Every rule looks at one thing and says something or nothing.  What ended or spoilt a run comes first, then what took
its time, the most first; where nothing of that is worth a change, compute is what is left, which is good.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from megabatch.report import figures
from megabatch.report.ranks import excess_s
from megabatch.report.shares import COMPUTE, DATA, STAGES, Seconds, shares_of
from megabatch.report.thin import finite, mean
from megabatch.report.view import RunView
from megabatch.text import one_line

Kind = Literal["problem", "limit", "good"]
WORTH = 0.05  # of the wall time, from which on a change is worth it
LIMITS = 0.10  # from which on it limits the run
SKIPPED_WORTH = 0.01  # of steps
FEWEST_STEPS = 50  # to say that a loss does not fall
LONGEST_SOURCE = 60


class Finding(NamedTuple):
    kind: Kind
    share: float  # of the wall time that it is about
    figure: str
    title: str
    advice: str


class Facts(NamedTuple):
    view: RunView
    shares: Seconds

    def share(self, *keys: str) -> float:
        return math.fsum(self.shares.get(key, 0.0) for key in keys)


Rule = Callable[[Facts], Finding | None]


def saving(share: float) -> str:
    return f"without it the run would be {1 / (1 - min(share, 0.95)):.2f} times as fast"


def ended_early(facts: Facts) -> Finding | None:
    view = facts.view
    last = next((entry.text.split("\n")[0] for entry in reversed(view.log) if entry.text.startswith("rank ")), "")
    why = f" Its log says: {one_line(last, 200)}." if last else ""
    told = {
        "diverged": (
            "It diverged",
            f"The loss or gradients left the numbers.{why} Lower optim.learning_rate, or lengthen schedule.warmup_epochs.",
        ),
        "failed": ("It failed", f"It ended by an error.{why} The same command resumes from its newest checkpoint."),
        "killed": ("It was killed", f"It wrote no summary.{why} The same command resumes from its newest checkpoint."),
        "stopped": ("It was stopped", "It was asked to stop, and saved its state. The same command resumes."),
        "running": ("It is running", "This is what there is so far."),
    }
    if view.status not in told:
        return None
    title, advice = told[view.status]
    kind: Kind = "problem" if view.status in ("diverged", "failed", "killed") else "limit"
    return Finding(kind, 1.0, f"step {view.num_steps:,}", title, advice)


def lost_numbers(facts: Facts) -> Finding | None:
    losses = facts.view.steps.of["loss"]
    bad = len(losses) - len(finite(losses))
    if not bad:
        return None
    first = next(
        step for step, loss in zip(facts.view.steps.of["step"], losses, strict=True) if not math.isfinite(loss)
    )
    return Finding(
        "problem",
        1.0,
        figures.plural(bad, "step"),
        "The loss was not a number",
        f"For the first time in step {first:,.0f}. Lower optim.learning_rate, lengthen schedule.warmup_epochs, or "
        "set optim.clip_norm.",
    )


def does_not_learn(facts: Facts) -> Finding | None:
    losses = finite(facts.view.steps.of["loss"])
    if len(losses) < FEWEST_STEPS:
        return None
    tenth = max(1, len(losses) // 10)
    first, last = mean(losses[:tenth]), mean(losses[-tenth:])
    if last < 0.98 * first:
        return None
    return Finding(
        "problem",
        1.0,
        f"{figures.number(first, 3)} to {figures.number(last, 3)}",
        "The loss does not fall",
        "It ends where it began. Try optim.learning_rate three times lower and higher: megabatch lr-range finds the range.",
    )


def overflows(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = len(view.skipped_steps)
    if not view.num_steps or skipped < SKIPPED_WORTH * view.num_steps or skipped < 5:
        return None
    return Finding(
        "problem",
        skipped / view.num_steps,
        f"{skipped:,} of {view.num_steps:,} steps",
        "Gradients overflowed",
        "These steps were skipped. precision.name=bf16 needs no loss scale; a lower optim.learning_rate may help too.",
    )


def images_skipped(facts: Facts) -> Finding | None:
    view = facts.view
    skipped = view.summary.skipped_images if view.summary else view.skipped_images
    if not skipped:
        return None
    advice = "Others stood in for them. metrics.jsonl names them (skipped_images); replace them in the set."
    return Finding("problem", 0.0, figures.plural(skipped, "image"), "Images could not be read", advice)


def input_waits(facts: Facts) -> Finding | None:
    share = facts.share(*DATA)
    if share < WORTH:
        return None
    stages = {stage: facts.share(stage) for stage in STAGES}
    stage = max(stages, key=stages.__getitem__)
    told = f"{stage} was {figures.percent(stages[stage] / share)} of that; " if stages[stage] else ""
    return Finding(
        "limit",
        share,
        f"{figures.percent(share)} of the time",
        "Waiting for images",
        f"{told}{saving(share)}. {input_advice(facts.view, stage)}",
    )


def input_advice(view: RunView, stage: str) -> str:
    source, size = view.setting("data.source"), view.setting("data.image_size")
    shown = one_line(str(source), LONGEST_SOURCE) if isinstance(source, str) else "SOURCE"
    shorter = f" --shorter-side {-(-8 * size // 7)}" if isinstance(size, int) else ""
    threads = "Give each rank more run.decode_threads"
    advice = {
        "decode": f"Pack the images once: megabatch pack {shown} OUT{shorter}, then data.source=OUT. {threads} where cores are idle.",
        "read": f"Pack the images once, since few large files are read faster: megabatch pack {shown} OUT, then data.source=OUT, on a local disk.",
        "augment": f"{threads}, or crop from smaller images: megabatch pack {shown} OUT{shorter}.",
        "copy": "Copies to the device were not hidden: a larger batch.micro makes fewer of them.",
    }
    return advice[stage]


def comm_waits(facts: Facts) -> Finding | None:
    share = facts.share("comm")
    if share < WORTH:
        return None
    return Finding(
        "limit",
        share,
        f"{figures.percent(share)} of the time",
        "Exposed communication",
        f"Rank 0 waited for other ranks and the network after its own backward; {saving(share)}. {comm_advice(facts)}",
    )


def comm_advice(facts: Facts) -> str:
    view, tuning = facts.view, facts.view.tuning
    advice = []
    own_s = excess_s(view.ranks)
    if own_s > 0.5 * facts.share("comm") * view.wall_s:
        return "Most of it is one slow rank, not the network: see below."
    if tuning and view.num_steps:
        step_s = facts.share("comm") * view.wall_s / view.num_steps
        told = f"{figures.milliseconds(step_s)} a step, where {tuning.algorithms} was predicted to expose {figures.milliseconds(tuning.exposed_s)}"
        advice.append(f"It was {told}.")
    if tuning and tuning.topology.num_nodes > 1 and view.setting("comm.dtype") == "fp32":
        advice.append("comm.dtype=bf16 halves the bytes between hosts.")
    if view.setting("comm.algorithm") not in (None, "auto"):
        advice.append("comm.algorithm=auto chooses for each bucket by measurement.")
    advice.append("A larger batch.global with the same batch.micro accumulates more between all-reduces.")
    return " ".join(advice)


def straggler(facts: Facts) -> Finding | None:
    view = facts.view
    ordered = view.ranks.by_delay()
    if ordered and view.wall_s > 0:
        rank, delay_s = ordered[0].rank, excess_s(view.ranks)
        steps = view.ranks.num_steps
        each = f", {figures.milliseconds(delay_s / steps)} a step" if steps else ""
    elif view.ranks.straggler and view.num_steps and view.wall_s > 0:
        rank, each_s = view.ranks.straggler
        delay_s, each = each_s * view.num_steps, f", {figures.milliseconds(each_s)} a step"
    else:
        return None
    share = min(1.0, delay_s / view.wall_s)
    if share < WORTH:
        return None
    return Finding(
        "limit",
        share,
        f"{figures.percent(share)} of the time",
        f"Rank {rank:,} was waited for",
        f"It delayed the others by {figures.seconds(delay_s)} more than a usual rank did{each}. See what else runs on "
        "its host, whether that clocks down, and whether its disk is slower.",
    )


def evaluates_often(facts: Facts) -> Finding | None:
    share, view = facts.share("evaluation"), facts.view
    if share < LIMITS:
        return None
    every = view.setting("train.evaluate_every")
    times = max(2, math.ceil(share / (1 - share) / WORTH))
    advice = f"train.evaluate_every={(every if isinstance(every, int) and every else 1) * times} makes it about {figures.percent(WORTH)}."
    number = figures.plural(len(view.evaluations), "evaluation")
    return Finding(
        "limit", share, f"{figures.percent(share)} of the time", "Evaluations", f"{number}; {saving(share)}. {advice}"
    )


def held_by_checkpoints(facts: Facts) -> Finding | None:
    share = facts.share("checkpoint")
    if share < WORTH:
        return None
    saves = facts.view.summary.saves if facts.view.summary else None
    told = (
        f"{figures.plural(saves.count, 'checkpoint')}, the longest held training for {figures.seconds(saves.longest_stall_s)}; "
        if saves
        else ""
    )
    return Finding(
        "limit",
        share,
        f"{figures.percent(share)} of the time",
        "Checkpoints",
        f"{told}{saving(share)}. Write them less often (checkpoint.every_steps, checkpoint.every_minutes), or to a faster disk.",
    )


def other_time(facts: Facts) -> Finding | None:
    share = facts.share("other")
    if share < LIMITS or not facts.view.times.has_times:
        return None
    advice = "It is neither training, evaluation nor a checkpoint. With steps this short, the screen and the records cost as much: a larger batch.global has fewer steps."
    return Finding("limit", share, f"{figures.percent(share)} of the time", "Other work", advice)


def computes(facts: Facts) -> Finding | None:
    share = facts.share(*COMPUTE)
    waits = facts.share(*DATA, "comm")
    if not facts.shares or waits >= LIMITS:
        return None
    rest = "nothing to gain from input or network" if waits < WORTH else f"waits are {figures.percent(waits)}"
    return Finding(
        "good",
        share,
        f"{figures.percent(share)} of the time",
        "Compute",
        f"Rank 0 computed; {rest}. Faster from here: more ranks, a lower precision.name, or model.compile=true.",
    )


ENDINGS: tuple[Rule, ...] = (ended_early, lost_numbers, does_not_learn, overflows, images_skipped)
TIMES: tuple[Rule, ...] = (input_waits, comm_waits, straggler, evaluates_often, held_by_checkpoints, other_time)


def findings_of(view: RunView) -> list[Finding]:
    facts = Facts(view, shares_of(view.times.totals()))
    endings = [found for rule in ENDINGS if (found := rule(facts))]
    times = [found for rule in TIMES if (found := rule(facts))]
    good = computes(facts)
    return [*endings, *sorted(times, key=lambda found: -found.share), *([good] if good else [])]


def headline(view: RunView, findings: list[Finding]) -> str:
    """One sentence."""
    if not view.num_steps:
        return "This run has not taken a step."
    limit = next(
        (found for found in findings if found.kind == "limit" and found.share >= LIMITS and "time" in found.figure),
        None,
    )
    compute = next((found for found in findings if found.kind == "good"), None)
    ended = {"diverged": "This run diverged. ", "failed": "This run failed. ", "killed": "This run was killed. "}
    begin = ended.get(view.status, "")
    if limit:
        return f"{begin}{limit.title} limited this run: {limit.figure}."
    if compute:
        return f"{begin}Compute limited this run, as it should: {compute.figure}."
    return begin.strip() or "Nothing limited this run by itself."
