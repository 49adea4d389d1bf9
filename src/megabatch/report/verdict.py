"""What limited a run and what to change, in words, each with the figure behind it.

Every rule looks at one thing and says something or nothing.  What ended or spoilt a run comes first, then what took
its time, the most first; where nothing of that is worth a change, compute is what is left, which is good.
"""

from collections.abc import Sequence

from megabatch.report import figures
from megabatch.report.ending_rules import ENDING_RULES
from megabatch.report.findings import LIMITS, Facts, Finding
from megabatch.report.shares import COMPUTE, shares_of
from megabatch.report.time_rules import TIME_RULES, computes
from megabatch.report.view import RunView

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
