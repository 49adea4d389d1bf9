"""Rules of the verdict about what took the time of a run."""

import math

from megabatch.report import figures
from megabatch.report.findings import LIMITS, WORTH, Facts, Finding, Rule, saving, takes_time
from megabatch.report.ranks import excess_s
from megabatch.report.shares import COMPUTE, DATA, STAGES
from megabatch.report.view import RunView
from megabatch.text import one_line

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
