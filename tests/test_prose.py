"""The language check of `make lint`: the prose that it reads and the habits that it reports."""

from pathlib import Path

import pytest

from tools import prose

WORDS = prose.read_word_list()
SOURCE = '''\
"""Of a row: its length."""
# nobody reads
# this


def test_a_rank_that_hears_nothing():
    value = "key"
    raise ValueError(f"{value} letters are more than 4,096", "`alone`", r"\\bwhoever (is)")


class Row:
    def length(self):
        """Return the length.

        It is read alone.
        """
'''


def check_text(name: str, text: str, tmp_path: Path) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text)
    return [(finding.line, finding.words) for finding in prose.check(name, prose.read_passages(path), WORDS)]


def test_docstrings_comments_messages_and_test_names_are_checked(tmp_path: Path) -> None:
    assert check_text("a.py", SOURCE, tmp_path) == [
        (1, "Of"),
        (6, "hears"),
        (15, "alone"),
        (8, "letters"),
        (2, "nobody"),
    ]


def test_values_and_comments_of_toml_are_checked(tmp_path: Path) -> None:
    assert check_text("a.toml", 'a = 1  # read alone\nb = ["in c", "as the\\nothers say"]\n', tmp_path) == [
        (1, "alone"),
        (2, "say"),
    ]


def test_code_in_a_page_is_not_prose(tmp_path: Path) -> None:
    page = "Run `megabatch alone`.\n\n```\nmegabatch train alone\n```\nIt runs\nalone.\n"
    assert check_text("a.md", page, tmp_path) == [(7, "alone")]


@pytest.mark.parametrize(
    ("text", "is_habit"),
    [
        ("There is no GPU here.", False),
        ("This is no GPU.", True),
        ("As many as there are; so many that it fails.", False),
        ("Memory for so many images.", True),
        ("The report shows where the time goes.", False),
        ("Where a file is missing, it fails.", True),
        ("The file is read again.", False),
    ],
)
def test_ordinary_english_is_not_reported(text: str, is_habit: bool, tmp_path: Path) -> None:
    assert bool(check_text("a.md", text, tmp_path)) is is_habit
