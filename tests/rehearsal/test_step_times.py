from typing import Any

import msgspec
from megabatch_lab.rehearsal import fake_cuda

from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, StepRecord, StepTrace
from megabatch.training.loop import train
from megabatch.training.traces import traced
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, on, tiny


def rows_and_trace(world: World) -> dict[str, Any]:
    fake_cuda.reset()
    training = begin(tiny("train.epochs=4"), world)
    kept: list[StepTrace] = []
    records = list(traced(train(training), 0, training, kept.append))
    return {"rows": [msgspec.to_builtins(record) for record in records], "kept": msgspec.to_builtins(kept)}


def test_a_device_says_where_its_time_went_and_when_buckets_were_reduced(ranks: RankPool) -> None:
    for result in ranks.run(rows_and_trace, num_ranks=2, join=on("cuda")):
        steps = [msgspec.convert(row, StepRecord).times for row in result["rows"] if row["kind"] == "step"]
        tests = [msgspec.convert(row, EvaluationRecord).times for row in result["rows"] if row["kind"] != "step"]
        for part in ("forward", "backward", "update"):
            assert sum(getattr(times, part) for times in steps if times) > 0
        assert sum(times.evaluation for times in [*steps, *tests] if times) > 0
        (trace,) = msgspec.convert(result["kept"], list[StepTrace])
        assert 11 <= trace.step <= 17
        assert {"forward", "backward", "update"} <= {span.name for span in trace.spans if span.lane == "training"}
        assert [bucket.bucket for bucket in trace.buckets] == [0]
        assert all(0 < bucket.ready_s <= bucket.reduced_s for bucket in trace.buckets)
        assert any(span.bucket == 0 for span in trace.spans if span.lane != "training")
