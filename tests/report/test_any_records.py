"""Any records within their bounds give a page."""

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabatch.report.page import page_of
from megabatch.report.view import read_run
from megabatch.runs import files

COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(-1e6, 1e15)
AMOUNTS = st.floats(0, 1e15)
SHARES = st.floats(0, 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TIMES = st.fixed_dictionaries(
    {}, optional={"data": SECONDS, "forward": SECONDS, "comm": SECONDS, "evaluation": SECONDS}
)
STEPS = st.fixed_dictionaries(
    {
        "kind": st.just("step"),
        "step": COUNTS,
        "epoch": st.floats(0, 1e9),
        "loss": FINITE,
        "lr": FINITE,
        "loss_scale": st.floats(1e-300, 1e300, exclude_min=True),
        "skipped": st.booleans(),
        "image_size": COUNTS,
        "images_per_s": AMOUNTS,
        "data_wait_s": SECONDS,
        "comm_wait_s": SECONDS,
        "straggler": COUNTS,
        "straggler_delay_s": AMOUNTS,
        "wall_s": AMOUNTS,
        "times": TIMES,
    }
)
GPUS = st.fixed_dictionaries(
    {
        "utilization": st.none() | SHARES,
        "power_w": st.none() | AMOUNTS,
        "clock_mhz": st.none() | AMOUNTS,
        "slowed": st.dictionaries(st.sampled_from(["power cap", "heat", "power brake", "hardware slowdown"]), SHARES),
        "ecc_errors": st.none() | COUNTS,
        "xid_errors": COUNTS,
    }
)
EVALUATIONS = st.fixed_dictionaries(
    {
        "kind": st.just("evaluation"),
        "step": COUNTS,
        "epoch": st.floats(0, 1e9),
        "top1": SHARES,
        "top5": SHARES,
        "test_loss": FINITE,
        "class_top1": st.lists(st.none() | SHARES, max_size=40),
        "samples_evaluated": COUNTS,
        "resident_mb": st.none() | AMOUNTS,
        "wall_s": AMOUNTS,
        "times": TIMES,
        "rank_waits_s": st.lists(SECONDS, max_size=40),
        "rank_gpus": st.lists(st.none() | GPUS, max_size=40),
    }
)
MISTAKES = st.fixed_dictionaries(
    {
        "step": COUNTS,
        "class_counts": st.lists(COUNTS, max_size=30),
        "confusions": st.none() | st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), COUNTS), max_size=30),
    }
)
SPANS = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(["training", "node", "network"]),
        "name": st.text(max_size=20),
        "begin_s": SECONDS,
        "end_s": SECONDS,
        "bucket": st.none() | COUNTS,
        "is_wait": st.booleans(),
    }
)
BUCKETS = st.fixed_dictionaries(
    {"bucket": COUNTS, "num_bytes": COUNTS, "plan": st.text(max_size=9), "ready_s": SECONDS, "reduced_s": SECONDS}
)
TRACES = st.fixed_dictionaries(
    {
        "step": COUNTS,
        "duration_s": SECONDS,
        "spans": st.lists(SPANS, max_size=9),
        "buckets": st.lists(BUCKETS, max_size=4),
    }
)
LINES = st.lists(
    st.text(max_size=40).map(lambda text: f"2026-11-17 20:00:00 {text}") | st.text(max_size=60), max_size=6
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(STEPS | EVALUATIONS, max_size=12), mistakes=MISTAKES, trace=TRACES, lines=LINES)
def test_any_records_give_a_page(
    rows: list[dict[str, Any]], mistakes: dict[str, Any], trace: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / files.CONFIG).write_text('name = "x"\n[batch]\nglobal = 8\n')
    (tmp_path / files.METRICS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (tmp_path / files.MISTAKES).write_bytes(msgspec.json.encode(mistakes))
    (tmp_path / files.STEP_TRACE).write_bytes(msgspec.json.encode(trace))
    (tmp_path / files.LOG).write_text("\n".join(lines), errors="replace")
    view = read_run(tmp_path)
    assert not view.notes
    page = page_of([view])
    assert page.endswith("</html>\n")
    assert "nan%" not in page and "inf%" not in page
