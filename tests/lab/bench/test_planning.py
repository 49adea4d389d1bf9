import json
from pathlib import Path

from megabatch_lab.bench import planning


def test_bench_planning_chooses_for_both_clusters(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    planning.run(1, path)
    written = json.loads(path.read_text())
    assert set(written) == {"command", "machine", "rows"}
    assert [row["ranks"] for row in written["rows"]] == [2_048, 16_384]
    for row in written["rows"]:
        assert (row["gradients"], row["candidates"], row["rounds"]) == (161, 3, 1)
        assert row["choose_s"] > 0 and row["bytes_crossing_s"] > 0 and row["buckets"] >= 1
        # 2S(H-1)/H of ResNet-50's 102 MB, halved by bf16.  A ring sends more, the others as much.
        assert row["median_mb_from_a_node"] > 100
