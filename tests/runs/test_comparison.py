"""Comparison of runs, checked against scipy."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scipy.stats import t, ttest_ind, ttest_rel  # type: ignore[import-untyped]

from megabatch.errors import UserError
from megabatch.runs.comparison import RunComparison, compare
from megabatch.runs.folder import RunFolder
from megabatch.runs.intervals import Interval
from tests.support.recorded_runs import config_of, record_run

ARMS = {0.1: [0.912, 0.915, 0.911, 0.918], 0.2: [0.921, 0.917, 0.924, 0.919]}


def differing(compared: RunComparison) -> dict[str, list[Any]]:
    return {found.name: found.values for found in compared.settings}


def record_arms(folder: Path, first_seeds: list[int]) -> list[Path]:
    """Record four seeds of each learning rate, starting at its first seed."""
    return [
        record_run(folder / f"{rate}-{seed}", top1, seed=seed, optim__learning_rate=rate)
        for (rate, top1s), first in zip(ARMS.items(), first_seeds, strict=True)
        for seed, top1 in enumerate(top1s, first)
    ]


def require_interval(found: Interval | None, reference: Any) -> None:
    assert found is not None
    assert (found.low, found.high) == pytest.approx(tuple(reference), abs=1e-9)


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    one = record_run(tmp_path / "one", 0.9, about="words", run__dir="one", provenance={"a": "b"})
    other = record_run(tmp_path / "other", 0.9, seed=2, optim__momentum=0.9, optim__decay_all=True, run__threads=2)
    assert differing(compare([one, other])) == {
        "seed": [1, 2],
        "optim.decay_all": [False, True],
        "optim.momentum": [None, 0.9],
        "run.threads": [None, 2],
    }
    assert compare([one, one]).settings == compare([one]).settings == []


def test_true_differs_from_one(tmp_path: Path) -> None:
    paths = [record_run(tmp_path / str(value), optim__decay_all=value) for value in (True, 1, 1.0)]
    assert differing(compare(paths)) == {"optim.decay_all": [True, 1, 1.0]}
    assert compare(paths[1:]).settings == []


@pytest.mark.parametrize(
    ("settings", "is_a_group"),
    [
        ({"seed": 2}, True),
        ({"seed": 2, "name": "mine", "about": "x", "run__threads": 4, "checkpoint__keep": 3}, True),
        ({"seed": 2, "train__target_top1": 0.5, "data__image_timeout_s": 9, "comm__timeline": True}, True),
        ({"seed": 2, "optim__learning_rate": 0.2}, False),
        ({"optim__learning_rate": None}, False),
        ({"batch__global": 256}, False),
        ({"model__options": {"width": 8}}, False),
        ({"data__source": "fashion"}, False),
    ],
)
def test_runs_that_differ_only_in_seed_or_irrelevant_settings_form_a_group(
    settings: dict[str, Any], is_a_group: bool, tmp_path: Path
) -> None:
    paths = [record_run(tmp_path / "one", 0.9), record_run(tmp_path / "other", 0.9, **settings)]
    assert [group.runs for group in compare(paths).groups] == ([[0, 1]] if is_a_group else [[0], [1]])


def test_same_images_under_another_path_are_equal(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    here = {"directory": str(tmp_path)}
    one = record_run(tmp_path / "one", 0.9, data__source="images", environment=here)
    other = record_run(tmp_path / "other", 0.9, seed=2, data__source=str(tmp_path / "images"))
    gone = record_run(tmp_path / "gone", 0.9, seed=3, data__source="images", environment={"directory": "/no/such"})
    assert [group.runs for group in compare([one, other, gone]).groups] == [[0, 1, 2]]


def test_mean_over_seeds_has_students_interval(tmp_path: Path) -> None:
    first, second = compare(record_arms(tmp_path, [1, 1])).groups
    for group, (rate, top1s) in zip((first, second), ARMS.items(), strict=True):
        assert group.seeds == [1, 2, 3, 4] and group.settings == {"optim.learning_rate": rate}
        assert group.top1 is not None and group.top1.mean == pytest.approx(sum(top1s) / 4)
        error = group.top1.deviation / 2  # type: ignore[operator]
        require_interval(group.top1.interval, t.interval(0.95, df=3, loc=group.top1.mean, scale=error))


def test_gap_is_paired_for_equal_seeds_and_welchs_otherwise(tmp_path: Path) -> None:
    first, second = ARMS.values()
    paired = compare(record_arms(tmp_path / "same", [1, 1])).groups[1].gap_to_first
    welch = compare(record_arms(tmp_path / "others", [1, 2])).groups[1].gap_to_first
    assert paired is not None and welch is not None and (paired.is_paired, welch.is_paired) == (True, False)
    assert paired.size == pytest.approx(welch.size) and paired.size > 0  # the second is better
    require_interval(paired.interval, ttest_rel(second, first).confidence_interval(0.95))
    require_interval(welch.interval, ttest_ind(second, first, equal_var=False).confidence_interval(0.95))


def test_runs_are_paired_by_seed_and_not_by_order(tmp_path: Path) -> None:
    paths = record_arms(tmp_path, [1, 1])
    paired = compare(paths).groups[1].gap_to_first
    assert compare([*paths[:4], *reversed(paths[4:])]).groups[1].gap_to_first == paired


def test_repeated_seed_counts_once(tmp_path: Path) -> None:
    once = [record_run(tmp_path / f"{seed}", 0.9 + seed / 100, seed=seed) for seed in (1, 2)]
    again = record_run(tmp_path / "again", 0.91, seed=1)
    assert compare([*once, again]).groups[0].top1 == compare(once).groups[0].top1


def test_mean_skips_unfinished_runs_and_is_missing_if_a_run_diverged(tmp_path: Path) -> None:
    paths = [record_run(tmp_path / f"{seed}", 0.9 + seed / 100, seed=seed) for seed in (1, 2)]
    killed = record_run(tmp_path / "killed", 0.1, seed=3, status=None)
    stopped = record_run(tmp_path / "stopped", 0.1, seed=4, status="stopped")
    group = compare([*paths, killed, stopped]).groups[0]
    assert group.top1 == compare(paths).groups[0].top1 and group.num_unfinished == 2 and group.seeds == [1, 2]
    diverged = compare([*paths, record_run(tmp_path / "diverged", 0.1, seed=5, status="diverged")]).groups[0]
    assert (diverged.num_diverged, diverged.top1) == (1, None)
    assert compare([killed]).groups[0].top1 is None


def test_killed_run_has_the_values_of_its_would_be_summary(tmp_path: Path) -> None:
    whole = record_run(tmp_path / "whole", 0.5, 0.95, 0.92)
    killed = record_run(tmp_path / "killed", 0.5, 0.95, 0.92, status=None)
    summarised, added_up = compare([whole, killed]).runs
    same = {"status": "finished", "path": str(whole), "steps_to_target": None}
    assert (added_up.status, added_up.steps_to_target) == ("killed", 4)
    assert msgspec.structs.replace(added_up, **same) == summarised
    assert (summarised.top1, summarised.best_top1, summarised.steps, summarised.wall_s) == (0.92, 0.95, 6, 9.0)
    assert summarised.time_to_target_s == 6.0


def test_running_run_shows_its_rows_so_far(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin(config_of(1, {}), {}, step=0)
        begun = compare([tmp_path]).runs[0]
    assert (begun.status, begun.steps, begun.top1, begun.wall_s, begun.images_per_s) == ("running", 0, None, None, None)


def test_resume_is_read_from_the_log_without_a_summary(tmp_path: Path) -> None:
    record_run(tmp_path, 0.5, 0.6, status=None)
    assert compare([tmp_path]).runs[0].resumed_from_step is None
    with RunFolder(tmp_path) as folder:
        folder.begin(config_of(1, {}), {}, step=2)
        folder.log("warning: begins at step 7")  # not a start
    resumed = compare([tmp_path]).runs[0]
    assert (resumed.resumed_from_step, resumed.steps) == (2, 2)


def test_requested_target_is_found_in_the_rows(tmp_path: Path) -> None:
    new = record_run(tmp_path / "new", 0.5, 0.7, 0.95)
    found = compare([new], target=0.6).runs[0]
    assert (found.target_top1, found.time_to_target_s, found.steps_to_target) == (0.6, 6.0, 4)
    missed = compare([new], target=0.99).runs[0]
    assert (missed.time_to_target_s, missed.steps_to_target) == (None, None)


def test_ranks_and_hosts_come_from_the_plan_or_the_launcher(tmp_path: Path) -> None:
    paths = [
        record_run(tmp_path / name, 0.9, environment={"variables": {"WORLD_SIZE": size}})
        for name, size in (("planned", "4"), ("launched", "4"), ("unknown", "many"))
    ]
    (paths[0] / "plan.json").write_text('{"topology":{"nodes":[[0,1,2],[3,4,5]]},"links":{}}')
    (paths[1] / "plan.json").write_text('{"topology":{"nodes":[[0,5]]}}')
    assert [(run.ranks, run.hosts) for run in compare(paths).runs] == [(6, 2), (4, None), (None, None)]


def test_differing_versions_and_machines_are_listed(tmp_path: Path) -> None:
    one = record_run(tmp_path / "one", environment={"torch": "2.13", "host": "a", "gpus": ["H100", "H100"]})
    other = record_run(tmp_path / "other", environment={"torch": "2.14", "host": "a", "gpus": []})
    found = {difference.name: difference.values for difference in compare([one, other]).environment}
    assert found == {"torch": ["2.13", "2.14"], "gpus": ["2 x H100", None]}


def test_run_passed_twice_counts_once_in_order(tmp_path: Path) -> None:
    one, other = record_run(tmp_path / "one", 0.9), record_run(tmp_path / "other", 0.9)
    (tmp_path / "link").symlink_to(one)
    found = compare([other, one, tmp_path / "link", other])
    assert [run.path for run in found.runs] == [str(other), str(one)]


def test_toml_values_without_json_type_become_text(tmp_path: Path) -> None:
    paths = [record_run(tmp_path / name, 0.9) for name in ("one", "other")]
    for path, value in zip(paths, ("nan", "[1979-05-27, inf]"), strict=True):
        (path / "config.toml").write_text(f"{config_of(1, {})}\n[x]\ny = {value}\nz = nan\n")
    found = compare(paths)
    assert differing(found) == {"x.y": ["nan", ["1979-05-27", "inf"]]}
    assert msgspec.json.decode(msgspec.json.encode(found), type=RunComparison) == found


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", b"no = toml =", "config.toml is damaged"),
        ("config.toml", b"\xff", "config.toml is damaged"),
        ("summary.json", b"{}", "summary.json is damaged"),
        ("metrics.jsonl", b"[]\n", "metrics.jsonl, row 1: .*damaged"),
    ],
)
def test_damaged_run_is_a_user_error(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = record_run(tmp_path / "run\nrun", 0.9, status="finished" if name == "summary.json" else None)
    (path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        compare([path])
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize("changes", [{"batch.global": None}, {"batch.global": 0}, {"batch": 5}])
def test_rows_without_a_batch_are_a_user_error(changes: dict[str, Any], tmp_path: Path) -> None:
    path = record_run(tmp_path, 0.9, status=None)
    (path / "config.toml").write_text(config_of(1, changes))
    with pytest.raises(UserError, match=r"damaged.*step without images"):
        compare([path])


def test_unreadable_rows_are_a_user_error(tmp_path: Path) -> None:
    path = record_run(tmp_path, 0.9, status=None)
    (path / "metrics.jsonl").unlink()
    assert compare([path]).runs[0].steps == 0
    os.mkfifo(path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read .*not a regular file"):
        compare([path])


def test_folder_without_a_run_is_a_user_error_with_a_remedy(tmp_path: Path) -> None:
    record_run(tmp_path / "runs/one", 0.9)
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "runs/one/no"):
        with pytest.raises(UserError, match=r"not a run's folder.*`megabatch runs` lists runs"):
            compare([path])
    with pytest.raises(UserError, match=r"pass the runs in it: .*/runs/\*$"):
        compare([tmp_path / "runs"])
    with pytest.raises(UserError, match="no runs to compare; for example"):
        compare([])
