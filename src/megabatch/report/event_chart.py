"""Starts, resumptions and faults: a lane of marks along the wall time, and what the log says of each."""

from collections.abc import Sequence

from megabatch.report import figures, svg
from megabatch.report.events import NAMES, RunEvent
from megabatch.report.figure import Key, figure, table
from megabatch.report.html import Markup, tag
from megabatch.report.scales import along_time
from megabatch.report.view import RunView

LANE_PX = 34
MOST_ROWS = 100
STYLES = {"start": "said", "end": "said", "said": "said", "resumed": "resumed", "fault": "fault", "warning": "warning"}


def event_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Only where more happened than a start and an end."""
    if all(event.kind in ("start", "end") for event in events):
        return None
    scale = along_time(view.wall_s)
    marks = []
    for event in [event for event in events if event.wall_s is not None][:MOST_ROWS]:
        at = scale.share(event.wall_s or 0.0)
        tip = f"{NAMES[event.kind]} at {event.at}, {where(event)}: {event.text}"
        marks.append(
            tag(
                "circle",
                class_=f"mark {STYLES[event.kind]}",
                cx=svg.percent(at),
                cy=LANE_PX / 2,
                r=6 if event.kind in ("fault", "resumed") else 4,
                data_tip=tip,
            )
        )
    drawing = svg.plot(
        "events-plot",
        "What happened when",
        f"{len(events)} lines of the log along {figures.seconds(view.wall_s)} of training.",
        LANE_PX + svg.FOOT_PX,
        svg.box(0, 0, 1, LANE_PX, "lane"),
        *marks,
        svg.x_axis(scale, LANE_PX),
        style="flush",
    )
    kinds = dict.fromkeys(STYLES[event.kind] for event in events)
    names = {"said": "start, end or note", "resumed": "resumed", "fault": "fault", "warning": "warning"}
    rows = [(NAMES[event.kind], event.at, where(event), event.text) for event in events]
    return figure(
        "events-figure",
        "What happened when",
        "From train.log, along the wall time of training. What a resumption repeats is counted once.",
        tag(
            "div", drawing, table(("", "at", "in the run", "log"), rows, left=(0, 1, 2, 3), most=MOST_ROWS, hints=(1,))
        ),
        keys=[Key(f"mark {kind}", names[kind], form="box") for kind in kinds],
        wide=True,
    )


def where(event: RunEvent) -> str:
    if event.step is None:
        return figures.NOTHING
    return f"step {event.step:,.0f}"
