"""Old names of settings are read wherever settings are, and one line says the new ones."""

from pathlib import Path

import pytest

from megabatch.config.loading import load_config
from megabatch.config.messages import suggest
from megabatch.config.recipes import read_recipe, recipe_names
from megabatch.config.renamed import RENAMED, with_current_names
from megabatch.config.schema import FIELDS, RunConfig
from megabatch.errors import UserError
from megabatch.train.resume import why_other

OLD = """
[model]
name = "small_cnn"
[data]
source = "synthetic"
image_size = 16
[batch]
global = 8
micro = 4
[optim]
learning_rate = 0.1
trust = 0.02
[comm]
wire = "bf16"
fusion_mb = 3.0
[train]
epochs = 1
[marks]
seed = "assumed: x"
optim.trust = "assumed: y"
"""
NEW = (
    OLD.replace("trust =", "trust_coefficient =")
    .replace("wire", "dtype")
    .replace("fusion_mb", "bucket_mb")
    .replace("marks", "provenance")
)


def load(recipe: str | Path, *overrides: str) -> tuple[RunConfig, list[str]]:
    """The config, and the lines that were reported."""
    lines: list[str] = []
    return load_config(str(recipe), overrides, report=lines.append), lines


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_new_name_is_a_setting_and_no_old_one_is() -> None:
    assert set(RENAMED.values()) <= set(FIELDS)
    assert not [key for key in FIELDS for old in RENAMED if key == old or key.startswith(f"{old}.")]


def test_a_recipe_with_old_names_is_the_recipe_with_new_ones(tmp_path: Path) -> None:
    config, lines = load(write(tmp_path / "mine.toml", OLD))
    write(tmp_path / "mine.toml", NEW)
    assert (config, []) == load(tmp_path / "mine.toml")
    assert config.provenance == {"seed": "assumed: x", "optim.trust_coefficient": "assumed: y"}
    assert lines == [
        "optim.trust is now called optim.trust_coefficient, comm.wire is now called comm.dtype, "
        "comm.fusion_mb is now called comm.bucket_mb, marks is now called provenance"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("comm.wire=bf16", "comm.dtype=bf16"),
        ("comm.fusion_mb=3", "comm.bucket_mb=3"),
        ("optim.trust=0.02", "optim.trust_coefficient=0.02"),
        ("marks.seed=assumed: x", "provenance.seed=assumed: x"),
        ("marks.optim.trust=assumed: x", "provenance.optim.trust_coefficient=assumed: x"),
        ("provenance.optim.trust=assumed: x", "provenance.optim.trust_coefficient=assumed: x"),
    ],
)
def test_an_override_with_an_old_name_is_the_override_with_the_new_one(old: str, new: str) -> None:
    config, lines = load("fashion", old)
    assert (config, []) == load("fashion", new)
    assert lines == [f"{old.partition('=')[0]} is now called {new.partition('=')[0]}"]


def test_old_names_in_an_override_of_a_section_are_read() -> None:
    config, lines = load("fashion", 'comm={wire="bf16"}', 'marks={optim.trust="assumed: x"}')
    assert (config.comm.dtype, config.provenance) == ("bf16", {"optim.trust_coefficient": "assumed: x"})
    assert lines == [
        "comm.wire is now called comm.dtype, marks is now called provenance, "
        "optim.trust is now called optim.trust_coefficient"
    ]


def test_an_override_wins_over_the_recipe_whichever_of_them_has_the_old_name(tmp_path: Path) -> None:
    assert load("fashion-3k", "optim.trust=0.5")[0].optim.trust_coefficient == 0.5
    old = write(tmp_path / "mine.toml", OLD)
    config, _ = load(old, "optim.trust_coefficient=0.5", "comm.dtype=fp16", "provenance.about=assumed: z")
    assert (config.optim.trust_coefficient, config.comm.dtype) == (0.5, "fp16")
    assert config.provenance == {"seed": "assumed: x", "about": "assumed: z"}  # the value is the user's now


def test_a_provenance_is_dropped_when_the_value_is_given_under_its_old_name() -> None:
    assert "optim.trust_coefficient" in load("fashion-3k")[0].provenance
    assert "optim.trust_coefficient" not in load("fashion-3k", "optim.trust=0.5")[0].provenance


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (("comm.wire=bf16", "comm.dtype=bf16"), "comm.wire and comm.dtype"),
        (("comm.bucket_mb=1", "comm.fusion_mb=2"), "comm.bucket_mb and comm.fusion_mb"),
        (("optim.trust=1", "optim.trust_coefficient=2"), "optim.trust and optim.trust_coefficient"),
        (("marks.seed=assumed: x", "provenance.seed=assumed: x"), "marks.seed and provenance.seed"),
        (('comm={wire="bf16", dtype="bf16"}',), "comm.wire and comm.dtype"),
    ],
)
def test_old_and_new_name_together_are_refused_in_one_line(overrides: tuple[str, ...], names: str) -> None:
    with pytest.raises(
        UserError, match=rf"^{names} are both given, and are the same setting; give \S+ alone$"
    ) as error:
        load("fashion", *overrides)
    assert not any(f"give {old} alone" in str(error.value) for old in RENAMED)


def test_a_recipe_with_both_names_is_refused(tmp_path: Path) -> None:
    for both in ("[comm]\nwire = 'fp32'\ndtype = 'fp32'", "[marks]\nseed = 'assumed: x'\n[provenance]"):
        with pytest.raises(UserError, match=r"^(comm\.)?(wire|marks) and \S+ are both given"):
            load(write(tmp_path / "both.toml", both))


def test_errors_name_the_new_key() -> None:
    for override, message in {
        "comm.wire=fp23": "^comm.dtype='fp23'",
        "comm.fusion_mb=big": "^comm.bucket_mb='big'.*for example comm.bucket_mb=",
        "optim.trust=0": "^optim.trust_coefficient=0: .*for example optim.trust_coefficient=",
        "marks.seed=guessed": "^provenance.seed='guessed'.*for example provenance.seed=",
        "marks=3": "^provenance=3",
    }.items():
        with pytest.raises(UserError, match=message):
            load("fashion", override)


def test_an_old_name_is_never_suggested() -> None:
    for key in ("comm.wires", "wire", "fusion", "comm.fusion_md", "optim.trus", "trust", "mark", "marcs"):
        assert suggest(key).removeprefix("nearest: ") in FIELDS


@pytest.mark.parametrize("recipe", ["fashion", "fashion-3k", "alexnet-bn-imagenet-64k"])
def test_the_recipe_of_an_older_run_is_read_and_is_the_same(recipe: str, tmp_path: Path) -> None:
    config, _ = load(recipe, "comm.dtype=bf16")
    text = config.to_toml()
    for old, new in RENAMED.items():  # `[comm]` has `dtype = `, and `[provenance]` dotted names in quotes
        text = text.replace(f'"{new}"', f'"{old}"').replace(f"[{new}]", f"[{old}]")
        text = text.replace(f"\n{new.rpartition('.')[2]} = ", f"\n{old.rpartition('.')[2]} = ")
    assert "dtype" not in text and "\ntrust = " in text
    again, lines = load(write(tmp_path / "config.toml", text))
    assert again == config
    assert len(lines) == 1 and "comm.fusion_mb is now called comm.bucket_mb" in lines[0]
    assert why_other(tmp_path, config) is None


def test_what_is_written_and_what_comes_with_megabatch_has_new_names_only() -> None:
    for name in recipe_names():
        assert with_current_names(read_recipe(name))[1] == {}
        assert load(name)[1] == []
    config, _ = load("fashion-3k", "comm.wire=bf16", "marks.seed=assumed: x")
    assert not any(f"\n{old.rpartition('.')[2]} = " in config.to_toml() for old in RENAMED)
    assert "[marks]" not in config.to_toml()


def test_the_line_is_printed_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    load_config("fashion", ["comm.wire=bf16", "comm.wire=fp32"])
    load_config("fashion", ["comm.dtype=bf16"])
    assert capsys.readouterr() == ("", "megabatch: comm.wire is now called comm.dtype\n")
