"""Parsing of the options of `megabatch simulate`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.simulate.request import (
    MOST_RANKS,
    ModelSettings,
    Sweep,
    parse_model_settings,
    parse_ranks,
    parse_sweep,
    parse_within,
    split_overrides,
)


def test_ranks_keep_their_order() -> None:
    assert parse_ranks("512,8, 64") == [512, 8, 64]
    assert parse_ranks("4,8..64,100") == [4, 8, 16, 32, 64, 100]
    assert parse_ranks("1..1") == [1]


def test_a_rank_count_is_simulated_once() -> None:
    assert parse_ranks("8,8,16,4..16") == [8, 16, 4]


@given(st.integers(1, MOST_RANKS), st.integers(1, MOST_RANKS))
def test_a_range_is_doublings_up_to_its_end(one: int, other: int) -> None:
    low, high = sorted((one, other))
    doublings = [low]
    while 2 * doublings[-1] <= high:
        doublings.append(2 * doublings[-1])
    assert parse_ranks(f"{low}..{high}") == doublings


@pytest.mark.parametrize(
    "text", ["", "x", "8,", "8..", "..8", "8.5", "0", "-8", "64..8", "1000001", "9" * 40, "8...16", "_", "8__0", "8_0"]
)
def test_invalid_ranks_give_a_message_of_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^--ranks") as refused:
        parse_ranks(text)
    assert "\n" not in str(refused.value) and ("nearest: " in str(refused.value) or "for example" in str(refused.value))


def test_too_many_ranks_are_rejected() -> None:
    with pytest.raises(UserError, match="65 values"):
        parse_ranks(",".join(map(str, range(1, 66))))


def test_a_time_needs_a_unit() -> None:
    assert [parse_within(text) for text in ("10min", "600s", "1.5h", " 2 h ", ".5min")] == [600, 600, 5400, 7200, 30]
    for text in ("", "10", "min", "-5min", "0s", "1e9h", "10m", "infh", "10 days"):
        with pytest.raises(UserError, match=r"^--within .*for example --within 10min"):
            parse_within(text)


def test_a_sweep_needs_a_number_of_the_cluster() -> None:
    assert parse_sweep("network.gbps=10, 25,1e2,0.5") == Sweep("network.gbps", [10, 25, 100, 0.5])
    assert parse_sweep("network.nics=1,2e0") == Sweep("network.nics", [1, 2])
    for text, remedy in {
        "network.gbps": "for example",
        "network.gbps=": "for example",
        "network.kind=tcp": "nearest: --sweep network.",
        "network.in_network_reduction=1": "nearest: --sweep network.",
        "netwrok.gbps=1": "nearest: --sweep network.gbps",
        "network.gbps=1,x": "expected a finite number|is not a number",
        "network.gbps=1,inf": "expected a finite number|is not a number",
        "network.gbps=1e300": "expected a finite number|is not a number",
        f"network.gbps=1{400 * '0'}": "expected a finite number|is not a number",
        "network.gbps=1,true": "expected a finite number|is not a number",
    }.items():
        with pytest.raises(UserError, match=remedy):
            parse_sweep(text)


def test_overrides_are_split_by_section() -> None:
    of_cluster = ["network.gbps=4", "node.ranks=2", "jitter.noise=0", "netwrok.gbps=4", "gbps=4", "network=4"]
    of_recipe = ["batch.global=4", "precision.name=fp16", "trian.epochs=3", "comm.dtype=fp16", "model.name=x", "foo"]
    assert split_overrides([*of_recipe, *of_cluster]) == (of_cluster, of_recipe)


def test_a_model_without_a_recipe_has_few_settings() -> None:
    given = ["precision.name=fp32", "data.image_size=192", "train.epochs=90", "batch.micro=32"]
    assert parse_model_settings(given) == ModelSettings(precision="fp32", image_size=192, epochs=90.0, microbatch=32)
    for override, remedy in {
        "optim.learning_rate=1": "nearest: ",
        "train.epoch=1": "nearest: train.epochs",
        "train.epochs=0": "expected a number > 0; for example train.epochs=90",
        "data.image_size=10.5": "expected an integer, got a number; for example data.image_size=224",
        "data.image_size=1e9": "expected an integer <= 8192",
        "batch.micro=x": "expected an integer, got text",
        "batch.micro=nan": "expected a finite number",
        "resnet50": "not an override",
    }.items():
        with pytest.raises(UserError, match=remedy):
            parse_model_settings([override])
