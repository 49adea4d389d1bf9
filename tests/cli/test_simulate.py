"""The command `megabatch simulate`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.cli.simulate_screen import BAR, bar
from megabatch.errors import UserError
from megabatch.io.numbers import duration, three_digits
from megabatch.simulate.cores import CoreCosts
from megabatch.simulate.load import load_cluster
from megabatch.simulate.scenario import Scenario, simulate
from megabatch.simulate.step import AllReduceSettings, SimulatedStep
from megabatch.simulate.workload import load_workload
from tests.support.simulated import made_up_profile

ON_PAPER = ["--cluster", "p40-roce100"]
ROW = {
    "ranks", "batch_per_rank", "step_s", "images_per_s", "low_images_per_s", "high_images_per_s",
    "efficiency", "exposed_s", "minutes", "plan",
}  # fmt: skip

PROFILE = made_up_profile("small_cnn", 16, 10, (8, 16, 32), (1 / 1e3, 1 / 5e2, 1 / 6e2), 10**5, 0.01)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def output(*words: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def rows(*words: str) -> list[dict[str, Any]]:
    output(*words, "--json", "rows.json")
    found: list[dict[str, Any]] = msgspec.json.decode(Path("rows.json").read_bytes())["rows"]
    return found


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_stored_model_is_simulated_without_torch() -> None:
    words = ["simulate", "alexnet", *ON_PAPER, "--ranks", "8,64", "--json", "rows.json"]
    code = (
        "import sys; from megabatch.cli.app import app\n"
        f"try: app({words!r}, prog_name='megabatch')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_rows_are_in_the_order_of_ranks_and_match_the_simulator() -> None:
    found = rows("alexnet", *ON_PAPER, "--ranks", "64,8,12", "--batch-per-rank", "100", "--overlap", "none")
    assert [row["ranks"] for row in found] == [64, 8, 12]
    assert all(set(row) >= ROW for row in found)
    for row in found:
        scenario = Scenario(
            workload=load_workload("alexnet"),
            cluster=load_cluster("p40-roce100"),
            num_ranks=row["ranks"],
            batch_per_rank=100,
            precision="fp16",
            all_reduce=AllReduceSettings(overlap="none"),
        )
        assert row == msgspec.json.decode(msgspec.json.encode(simulate(scenario).row))
        assert row["low_images_per_s"] < row["images_per_s"] < row["high_images_per_s"]
        assert row["minutes"] is None and row["rank_hours"] is None


def test_the_file_records_the_request() -> None:
    output("alexnet", *ON_PAPER, "--ranks", "8", "--comm-dtype", "fp16", "precision.name=amp", "--json", "rows.json")
    content = msgspec.json.decode(Path("rows.json").read_bytes())
    asked = {name: content[name] for name in ("cluster", "model", "precision", "overlap", "comm_dtype", "algorithm")}
    assert asked == {
        "cluster": "p40-roce100", "model": "alexnet", "precision": "amp", "overlap": "auto", "comm_dtype": "fp16",
        "algorithm": "auto",
    }  # fmt: skip
    assert content["command"].startswith("megabatch")


def test_a_recipe_gives_the_length_and_differences_from_it_are_noted() -> None:
    words = ["alexnet-bn-imagenet-64k", *ON_PAPER, "--ranks", "128..2048"]
    found = rows(*words)
    assert [row["batch_per_rank"] for row in found] == [512, 256, 128, 64, 32]
    minutes = [row["minutes"] for row in found]
    assert minutes[:4] == sorted(minutes[:4], reverse=True)
    assert found[0]["rank_hours"] == pytest.approx(128 * minutes[0] / 60)
    text = " ".join(output(*words).split())
    assert "note: at" in text and "set batch.micro=" in text
    for part in ("all-reduce at 2,048 ranks", "parts of a step of", "gain of one change at 2,048 ranks"):
        assert part in text


def test_recipe_and_cluster_settings_can_be_combined() -> None:
    (row,) = rows("alexnet-bn-imagenet-64k", *ON_PAPER, "--ranks", "64", "train.steps=100", "price.usd_per_rank_hour=2")
    assert row["usd"] == pytest.approx(2 * row["rank_hours"])
    assert row["minutes"] > 100 * row["step_s"] / 60  # evaluations are included
    faster = rows("alexnet", *ON_PAPER, "--ranks", "64", "--overlap", "none", "network.gbps=400")
    slower = rows("alexnet", *ON_PAPER, "--ranks", "64", "--overlap", "none", "network.gbps=10")
    assert faster[0]["exposed_s"] < slower[0]["exposed_s"]


def test_a_user_file_works_like_a_preset() -> None:
    Path("mine.toml").write_text('base = "p40-roce100"\n[node]\nranks = 4\n')
    (found,) = rows("alexnet", "--cluster", "mine.toml", "--ranks", "64")
    (preset,) = rows("alexnet", *ON_PAPER, "--ranks", "64", "node.ranks=4")
    assert found == preset


def test_a_model_that_is_not_stored_is_counted() -> None:
    (small,), (large,) = (
        rows(name, *ON_PAPER, "--ranks", "8", "--batch-per-rank", "64") for name in ("resnet18", "resnet50")
    )
    assert small["step_s"] < large["step_s"]


def test_compare_has_a_row_per_algorithm_and_marks_the_best() -> None:
    words = ["alexnet", *ON_PAPER, "--ranks", "8,64", "--compare"]
    found = rows(*words)
    assert [(row["ranks"], row["algorithm"]) for row in found] == [
        (ranks, name) for ranks in (8, 64) for name in ("ring", "flat", "hierarchical", "torus", "auto")
    ]
    assert output(*words).count(" *") == 3  # the legend, and one per rank count


def test_variant_rows_are_in_the_order_of_ranks_even_if_few_apply() -> None:
    found = rows("alexnet", *ON_PAPER, "--ranks", "1,12,8,8", "--compare")
    assert list(dict.fromkeys(row["ranks"] for row in found)) == [1, 12, 8]
    assert [row["ranks"] for row in found] == sorted((row["ranks"] for row in found), key=[1, 12, 8].index)
    assert [row["algorithm"] for row in found if row["ranks"] == 1] == ["auto"]


def test_a_sweep_has_a_row_per_value() -> None:
    found = rows("alexnet", *ON_PAPER, "--ranks", "64,8", "--sweep", "network.gbps=10,100")
    assert [(row["ranks"], row["network.gbps"]) for row in found] == [(64, 10), (64, 100), (8, 10), (8, 100)]
    (single,) = rows("alexnet", *ON_PAPER, "--ranks", "64", "network.gbps=10")
    assert found[0] == {"network.gbps": 10.0} | single
    found = rows("alexnet", *ON_PAPER, "--ranks", "64", "--sweep", "network.nics=1,2e0")
    assert [row["network.nics"] for row in found] == [1, 2]


def test_the_screen_starts_with_the_job_and_the_cluster() -> None:
    for cluster, overrides, line in (
        ("dgx-a100", [], "nodes of 8 at 183 GB/s, 8 cards of 200 Gb/s (rdma), in-network reduction"),
        (
            "dgx-a100",
            ["network.in_network_reduction=false", "network.kind=tcp", "network.nics=1"],
            "nodes of 8 at 183 GB/s, 1 card of 200 Gb/s (tcp), no in-network reduction",
        ),
        (
            "cpu-1gbe",
            ["cpu.cores=6", *(f"cpu.costs.{member.name}=0.5" for member in msgspec.structs.fields(CoreCosts))],
            "nodes of 2 on 6 cores, 1 card of 1.00 Gb/s (tcp), no in-network reduction",
        ),
        ("dgx-a100", ["node.ranks=1"], "nodes of one rank, 8 cards of 200 Gb/s (rdma), in-network reduction"),
    ):
        for question in ([], ["--compare"]):
            text = output("alexnet", "--cluster", cluster, "--ranks", "16", *overrides, *question)
            assert line in text.partition("ranks  ")[0].splitlines()


def test_an_ineffective_comm_dtype_is_noted() -> None:
    given = ["alexnet", *ON_PAPER, "--ranks", "8", "--comm-dtype", "bf16"]
    assert "note: --comm-dtype bf16 has no effect" in output(*given)
    assert "has no effect" not in output(*given, "precision.name=amp")


def test_the_ladder_is_a_table_of_factors() -> None:
    words = ["alexnet", *ON_PAPER, "--ranks", "512", "--ladder"]
    found = rows(*words)
    assert [row["improvement"] for row in found] == [
        "per-tensor ring", "+ fusion", "+ hierarchical", "+ hybrid", "+ 16 bits",
    ]  # fmt: skip
    lines = [line for line in output(*words).splitlines() if re.search(r"ring  |\+ ", line)]
    factors = [[float(figure) for figure in re.findall(r" (\d+\.\d\d) ", line)[-2:]] for line in lines]
    first = found[0]["images_per_s"]
    assert [factor for _, factor in factors] == pytest.approx([row["images_per_s"] / first for row in found], abs=0.01)


def test_within_prints_the_smallest_cluster() -> None:
    words = ["alexnet-bn-imagenet-64k", *ON_PAPER, "--within", "20min"]
    (row,) = rows(*words)
    content = msgspec.json.decode(Path("rows.json").read_bytes())
    assert row == content["within"]["smallest"] and row["minutes"] <= 20 and row["ranks"] % 8 == 0
    fewer = rows("alexnet-bn-imagenet-64k", *ON_PAPER, "--ranks", str(row["ranks"] // 2))
    assert fewer[0]["minutes"] > 20
    text = " ".join(output("alexnet-bn-imagenet-64k", *ON_PAPER, "--within", "1s").split())
    assert "no number of ranks finishes within 1s" in text and "limited by" in text


def test_a_figure_has_a_line_per_variant() -> None:
    output("alexnet", *ON_PAPER, "--ranks", "8..64", "--plot", "one.svg")
    output("alexnet", *ON_PAPER, "--ranks", "8..64", "--ladder", "--plot", "ladder.svg")
    one, steps = Path("one.svg").read_text(), Path("ladder.svg").read_text()
    assert all(
        word in one for word in ("images/s", "efficiency, %", "interval", "no rank waits", "alexnet on p40-roce100")
    )
    assert all(word in steps for word in ("per-tensor ring", "+ 16 bits", "no rank waits")) and "interval" not in steps


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("question", [[], ["--compare"], ["--ladder"], ["--sweep", "network.gbps=10,100"]])
def test_tables_fit_the_screen(columns: int, question: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    given = ["--cluster", "dgx-a100", "--ranks", "8,4096", "train.epochs=90"]
    text = output("alexnet", *given, *question)
    assert max(map(len, text.splitlines())) <= columns and "…" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a recipe or a model is missing; for example: "),
        (["network.gbps=4"], "a recipe or a model is missing"),
        (["alexnet"], "--cluster is missing; use "),
        (["alexnet", *ON_PAPER], "--ranks is missing; "),
        (["alexnet", "--cluster", "p40", "--ranks", "8"], "nearest: --cluster p40-roce100"),
        (["alexnet", "--cluster", "none.toml", "--ranks", "8"], "cannot be read"),
        (["alexne", *ON_PAPER, "--ranks", "8"], "nearest: alexnet"),
        (["resnet50-imagenet-65k", *ON_PAPER, "--ranks", "8"], "nearest: resnet50-imagenet-"),
        (["none.toml", *ON_PAPER, "--ranks", "8"], "is neither a built-in recipe"),
        (["alexnet", *ON_PAPER, "--ranks", "0"], "nearest: --ranks 1"),
        (["alexnet", *ON_PAPER, "--ranks", ""], "for example --ranks 8,64,512"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "netwrok.gbps=4"], "nearest: network.gbps"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "network.gbps=-4"], "p40-roce100 itself has network.gbps=100"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "network.gbps=1e99"], "expected a finite number"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "optim.learning_rate=4"], "a recipe instead of the model"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "precision.name=bf16"], "nearest: precision.name=fp16"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--batch-per-rank", "0"], "nearest: --batch-per-rank 1"),
        (["resnet50", *ON_PAPER, "--ranks", "8", "--batch-per-rank", "9999"], "P40 has 24; nearest: "),
        (["resnet50-imagenet-64k", *ON_PAPER, "--ranks", "96"], "nearest: --ranks 64 or 128"),
        (["resnet50-imagenet-256", *ON_PAPER, "--ranks", "8..512"], "nearest: --ranks 256"),
        (["resnet50-imagenet-64k", *ON_PAPER, "--ranks", "8", "trian.epochs=4"], "nearest: train.epochs"),
        (["resnet50-imagenet-64k", *ON_PAPER, "--ranks", "8", "batch.micro=8192"], "images per microbatch"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--json", "no/rows.json"], "does not exist; create it"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--json", "."], "--json . is a folder"),
        (["alexnet", *ON_PAPER, "--ranks", "_"], "for example --ranks 8,64,512"),
        (["alexnet", *ON_PAPER, "--ranks", "8", f"network.gbps=1{400 * '0'}"], "expected a finite number"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "sources=3"], "overrides of a cluster are section.key=value"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "name=foo"], "overrides of a cluster are section.key=value"),
        (["alexnet", "--cluster", "dgx-a100", "--ranks", "8", "device.variant=nothing"], "device.variant='nothing' is"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--ladder", "engine.sums=['tree']"], "add engine.sums=['ring']"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--plot", "figure.png"], "use --plot figure.svg"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--plot", "no/figure.svg"], "does not exist; create it"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--sweep", "network.kind=tcp"], "is not a number of a cluster"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--sweep", "network.gbps=1,-1"], "expected a number >= "),
        (["alexnet", *ON_PAPER, "--within", "10min"], "for example, train.epochs=90"),
        (["alexnet", *ON_PAPER, "--within", "soon", "train.epochs=90"], "for example --within 10min"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--comm-dtype", "fp8"], "nearest: --comm-dtype=fp"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--overlap", "some"], "is not one of auto, none, layer, fused"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--algorithm", "rign"], "nearest: --algorithm=ring"),
        (["alexnet", *ON_PAPER, "--ranks", "12", "--algorithm", "torus"], "different numbers of ranks"),
        (["alexnet", *ON_PAPER, "--ranks", "64", "--algorithm", "tree"], "engine does not have"),
        (["alexnet", "--cluster", "dgx-a100", "--ranks", "8", "--algorithm", "tree"], "they are all in one node"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--compare", "--ladder"], "cannot be combined"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--compare", "--algorithm", "ring"], "remove one of them"),
        (["alexnet", *ON_PAPER, "--ranks", "8", "--ladder", "--overlap", "none"], "remove --overlap none"),
    ],
)
def test_invalid_arguments_give_one_line_with_a_remedy(words: list[str], message: str) -> None:
    assert message in refusal(*words)


def test_a_bar_has_a_constant_length() -> None:
    for parts in ([1.0, 2.0, 0.0, 0.5, 0.1], [1.0, 0.0, 0.0, 0.0, 0.0], [1e-6, 1.0, 1e-6, 9.0, 1e-6]):
        forward_s, backward_s, update_s, exposed_s, jitter_s = parts
        step = SimulatedStep(
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            exposed_s=exposed_s,
            jitter_s=jitter_s,
            input_s=0.0,
            all_reduce_s=0.0,
            buckets=[],
        )
        drawn = bar(step)
        assert len(drawn) == BAR
        assert abs(drawn.count("░") / BAR - exposed_s / sum(parts)) <= 1 / BAR


@pytest.mark.parametrize("command", [["show"], ["train", "--dry-run"]])
def test_show_and_dry_run_predict_the_time_and_speed_on_a_cluster(command: list[str]) -> None:
    words = ["alexnet-bn-imagenet-16k", "data.sizes=[[0, 195], [0.5, 227]]", *ON_PAPER, "--ranks", "32"]
    (row,) = rows(*words)
    result = CliRunner().invoke(app, [*command, *words], catch_exceptions=False)
    table = [line.split() for line in result.output.partition("\nimage sizes\n")[2].splitlines()]
    assert [(line[0], line[-1]) for line in table[1:3]] == [
        (str(stage["side"]), three_digits(stage["images_per_s"])) for stage in row["stages"]
    ]
    (line,) = (line for line in result.output.splitlines() if line.startswith("time "))
    assert f"about {duration(60 * row['minutes'])} (" in line and "on 32 P40 of p40-roce100" in line


@pytest.mark.parametrize("command", [["show"], ["train", "--dry-run"]])
def test_show_and_dry_run_accept_a_profile_like_simulate(command: list[str]) -> None:
    Path("profile.json").write_bytes(msgspec.json.encode(PROFILE))
    given = ["smoke", "--cluster", "cpu-1gbe", "--ranks", "2", "--profile", "profile.json"]
    (row,) = rows(*given)
    result = CliRunner().invoke(app, [*command, *given], catch_exceptions=False)
    (line,) = (line for line in result.output.splitlines() if line.startswith("time "))
    assert f"about {duration(60 * row['minutes'])} (" in line and "on 2 ranks as in profile.json of cpu-1gbe" in line
    with pytest.raises(UserError, match=r"--profile profile\.json .*add --cluster"):
        CliRunner().invoke(app, [*command, "smoke", "--profile", "profile.json"], catch_exceptions=False)


@pytest.mark.parametrize("option", [ON_PAPER, ["--profile", "profile.json"]])
def test_train_accepts_a_cluster_only_for_a_dry_run(option: list[str]) -> None:
    with pytest.raises(UserError, match=rf"{' '.join(option)} .*add --dry-run"):
        CliRunner().invoke(app, ["train", "smoke", *option], catch_exceptions=False)


@pytest.mark.parametrize("option", ["--json", "--plot", "--docs"])
def test_a_bench_checks_its_output_path_before_it_measures(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} no/file"):
        CliRunner().invoke(app, ["bench", "simulator", option, "no/file"], catch_exceptions=False)


def test_batch_auto_gives_the_best_batch_for_each_number_of_ranks() -> None:
    words = ["resnet50", "--cluster", "dgx-h100", "--ranks", "64,4096", "--batch", "auto"]
    (row,) = rows(*words, "--plot", "plot.svg")
    assert row["ranks"] == 64 and row["batch"] % 64 == 0 and 35 < row["epochs"] < 60
    assert row["low_minutes"] < row["minutes"] < row["high_minutes"] and Path("plot.svg").stat().st_size > 1000
    shown = " ".join(output(*words, "--within", "1h").split())
    assert "cheapest within 1h: 64 ranks" in shown and "left out: 4,096 ranks" in shown
    assert [left["ranks"] for left in msgspec.json.decode(Path("rows.json").read_bytes())["left_out"]] == [4096]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--batch", "4096"], "expected auto"),
        (["--goal", "fame"], "fame"),
        (["--budget", "12eur"], "for example --budget 100usd"),
        (["--batch", "auto", "--budget", "1usd", "price.usd_per_rank_hour=0"], "price"),
        (["--batch", "auto", "--compare"], "remove --compare"),
        (["--curve", "nowhere"], "not a run's folder"),
    ],
)
def test_options_of_batch_auto_that_cannot_be_used_are_rejected(words: list[str], problem: str) -> None:
    assert problem in refusal("resnet50", "--cluster", "dgx-h100", "--ranks", "64", *words)


def test_batch_auto_needs_reference_points() -> None:
    assert "no reference convergence points of alexnet" in refusal(
        "alexnet", *ON_PAPER, "--ranks", "8", "--batch", "auto"
    )
