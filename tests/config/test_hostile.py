"""Hostile recipes and overrides: one line, without a traceback or a hang."""

import os
import threading
from pathlib import Path

import pytest

from megabatch.config.loading import default_name, load_config
from megabatch.errors import UserError
from megabatch.io.toml import DEEPEST, LONGEST_BYTES, NotToml, parse_toml

ESCAPE = "\x1b[31m"
DEEP = {
    "arrays": "x = " + "[" * 100_000,
    "closed arrays": "x = " + "[" * 40 + "]" * 40,
    "inline tables": "x = " + "{a=" * 50_000,
    "a dotted key": "a." * 100_000 + "a = 1",
    "a dotted key in quotes": r'"\"".' * 100_000 + "a = 1",
    "a header": "[" + "a." * 200_000 + "a]",
    "headers on headers": f"[{'.'.join('a' * 20)}]\n{'.'.join('b' * 20)} = 1",
    "digits": "x = " + "1" * 100_000,
}


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        load_config(recipe, overrides)
    line = str(refused.value)
    assert line.isprintable() and len(line) < 700, line
    return line


def written(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "mine.toml"
    path.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize("name", DEEP)
def test_toml_beyond_the_limits_is_refused(name: str, tmp_path: Path) -> None:
    assert "mine.toml is not TOML: " in refusal(written(tmp_path, DEEP[name]))
    with pytest.raises(NotToml):
        parse_toml(DEEP[name])


def test_toml_at_the_depth_limit_is_read() -> None:
    depth = DEEPEST - 1
    value = parse_toml(f"x = {'[' * depth}1{']' * depth}")["x"]
    for _ in range(depth):
        (value,) = value
    assert value == 1
    assert parse_toml(".".join("a" * DEEPEST) + " = 1")
    assert parse_toml('about = "see 1.2.3, e.g. a.b.c... and so on"')


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.options=" + "[" * 5_000, "model.options='[[[["),
        ("model.options=" + "{a=" * 5_000, "model.options='{a={a="),
        ("model.options.width=" + "9" * 5_000, "too many digits"),
        ("model.options.width=0x" + "f" * 5_000, "expected a 64-bit integer"),
        ("model.options.width=nan", "model.options.width=nan: expected a finite number"),
        ("model.options.width=[1, [inf]]", "model.options.width=inf: expected a finite number"),
        ("model.options.width=1979-05-27", "dates are not supported; put it in quotes"),
        ("model.options." + "a." * 10_000 + "b=1", "there is no such setting"),
        ("k" * 200_000 + "=1", "there is no setting kkk"),
        ("seed=" + "x" * 200_000, "200,000 characters; the limit is 4,096"),
        ("provenance." * 10_000 + "x=1", "there is no such setting"),
        ("seed=1\nbatch.global=2", "seed='1\\nbatch.global=2': control characters"),
        ("data.source=a\0b", "data.source='a\\x00b': control characters"),
        ('data.source="a\\u0000b"', "data.source='a\\x00b': control characters"),
        ("data.source=a\udcffb", "data.source='a\\udcffb': control characters"),
        (f"about=x{ESCAPE}", "about='x\\x1b[31m': control characters"),
        ('about="one\\ntwo"', "about='one\\ntwo': control characters"),
        ('data.also=["x", "a\\u001b"]', "data.also='a\\x1b': control characters"),
        ('model.options={"a\\u001b"=1}', "model.options.a?: the name has control characters"),
        ("run.dir=" + "x" * 5_000, "5,000 characters; the limit is 4,096"),
        ("run.dir=''", "run.dir='': expected text of length >= 1"),
        ("data.source=a/" + "x" * 300, "a file name has at most 255 bytes"),
        (f"{ESCAPE}=1", "control characters"),
        ("=1", "there is no setting"),
    ],
)
def test_a_hostile_override_is_refused_in_one_line_that_names_its_key(override: str, message: str) -> None:
    assert message in refusal("fashion", override)


@pytest.mark.parametrize("name", ["..", ".", "-x", "", ".hidden", "a/b", "a b", "x\n", "x" * 300, "runs/../../x"])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    assert "name=" in refusal("fashion", f"name={name}" if name else "name=''")


@pytest.mark.parametrize(
    "file", ["-x.toml", "...toml", "x" * 300 + ".toml", "a b\n.toml", ".toml", "\x1b.toml", "é.toml"]
)
def test_every_file_name_makes_a_valid_recipe_name(file: str, tmp_path: Path) -> None:
    load_config("fashion", [f"name={default_name(file)}"])


def test_a_quoted_dotted_key_is_refused(tmp_path: Path) -> None:
    text = load_config("smoke").to_toml()
    assert "remove the quotes" in refusal(written(tmp_path, '"optim.momentum" = 0.5\n' + text))


@pytest.mark.parametrize("content", [b"name = '\xff'", b"\0", "name = '\x1b'", b"x" * (LONGEST_BYTES + 1)])
def test_a_file_that_is_not_utf8_is_refused(content: str | bytes, tmp_path: Path) -> None:
    assert "mine.toml is not TOML: " in refusal(written(tmp_path, content))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + load_config("smoke").to_toml().encode())
    assert load_config(path) == load_config("smoke")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in ("pipe", "link"):
        assert "it is not a regular file" in refusal(str(tmp_path / path))
    assert "it is not a regular file" in refusal("/dev/zero")
    assert "NUL" in refusal("a\0b")
    assert "is neither a built-in recipe" in refusal("x" * 300)
    assert "is neither a built-in recipe" in refusal("a\udcffb")


def test_a_recipe_is_read_from_a_pipe() -> None:
    """Read a recipe as in `megabatch show <(...)`."""
    out, into = os.pipe()
    writer = threading.Thread(target=lambda: os.fdopen(into, "w").write(load_config("smoke").to_toml()))
    writer.start()
    try:
        assert load_config(f"/dev/fd/{out}") == load_config("smoke")
    finally:
        writer.join()
        os.close(out)
