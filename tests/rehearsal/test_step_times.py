import os
from pathlib import Path
from typing import Any

import msgspec
from megabatch_lab.rehearsal import fake_cuda

from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord, GpuUse, StepRecord, StepTrace
from megabatch.training import gpu_use
from megabatch.training.loop import train
from megabatch.training.traces import trace_step
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, build_nvml, on, tiny


def rows_and_trace(world: World) -> dict[str, Any]:
    fake_cuda.reset()
    training = begin(tiny("train.epochs=4"), world)
    kept: list[StepTrace] = []
    records = list(trace_step(train(training), 0, training, kept.append))
    return {"rows": [msgspec.to_builtins(record) for record in records], "kept": msgspec.to_builtins(kept)}


def test_device_times_and_bucket_times_are_recorded(ranks: RankPool) -> None:
    for result in ranks.run(rows_and_trace, num_ranks=2, join=on("cuda")):
        steps = [msgspec.convert(row, StepRecord).times for row in result["rows"] if row["kind"] == "step"]
        tests = [msgspec.convert(row, EvaluationRecord).times for row in result["rows"] if row["kind"] != "step"]
        for part in ("forward", "backward", "comm", "update"):
            assert sum(getattr(times, part) for times in steps if times) > 0
        assert sum((times.evaluation for times in [*steps, *tests] if times), 0.0) > 0
        (trace,) = msgspec.convert(result["kept"], list[StepTrace])
        assert 11 <= trace.step <= 17
        assert {"forward", "backward", "all-reduce", "update"} <= {
            span.name for span in trace.spans if span.lane == "training"
        }
        assert [bucket.bucket for bucket in trace.buckets] == [0]
        assert all(0 < bucket.ready_s <= bucket.reduced_s for bucket in trace.buckets)
        assert any(span.bucket == 0 for span in trace.spans if span.lane != "training")


def gpus_of_evaluations(world: World, library: Path) -> list[list[GpuUse | None]]:
    os.environ["FAKE_NVML"] = str(library.with_name("gpus"))
    gpu_use.LIBRARY, gpu_use.INTERVAL_S = str(library), 1e-4
    records = train(begin(tiny(), world))
    return [record.rank_gpus for record in records if isinstance(record, EvaluationRecord)]


def test_evaluations_record_the_gpu_of_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    library = build_nvml(tmp_path)
    (tmp_path / "gpus").write_text("GPU-fake-0 90 300000 1410 0 60 0 0\nGPU-fake-1 90 300000 1005 32 85 0 1\n")
    found = ranks.run(gpus_of_evaluations, library, num_ranks=2, join=on("cuda"))
    assert found[0] == found[1] and len(found[0]) == 2
    for first, second in found[0]:
        assert first and (first.clock_mhz, first.slowed, first.xid_errors) == (1410, {}, 0)
        assert second and (second.clock_mhz, second.slowed, second.xid_errors) == (1005, {"heat": 1.0}, 1)
