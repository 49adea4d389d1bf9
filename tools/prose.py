"""Report habits of language that make our prose hard to read, as file:line, the words and a better choice.

    python tools/prose.py                       check the whole checkout and the commit subjects: `make lint` runs it
    python tools/prose.py src/megabatch/comm    check some folders or files
    python tools/prose.py --counts              print the number of each habit
    python tools/prose.py --counts --at 919734f the same for an earlier commit

tools/prose.toml has the habits and the exceptions, each with its reason.  Prose is read from messages (strings of
several words), docstrings, comments, test names and Markdown outside of code.
"""

import argparse
import ast
import inspect
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_suffix(".toml")
FOLDERS = ("src", "lab", "tests", "tools", "docs", ".ci", ".github")
IGNORED = ("docs/licences.md", "tools/prose.toml", "tests/test_prose.py")  # package names; the words themselves
HASH_COMMENTS = {".toml", ".yml", ".yaml", ".sh", ".txt", ""}
C_COMMENTS = {".cpp", ".h", ".js", ".css"}


class Passage(NamedTuple):
    """Prose with the line of each of its pieces, which are joined by spaces."""

    kind: str  # message, docstring, comment, page, test name or subject
    pieces: list[tuple[int, str]]

    @property
    def text(self) -> str:
        return " ".join(piece for _, piece in self.pieces)

    def line_at(self, offset: int) -> int:
        starts, position = [], 0
        for _, piece in self.pieces:
            starts.append(position)
            position += len(piece) + 1
        return self.pieces[bisect_right(starts, offset) - 1][0]


class Finding(NamedTuple):
    path: str
    line: int
    habit: str
    words: str
    better: str


class Habit(NamedTuple):
    name: str
    pattern: re.Pattern[str]
    better: str
    kinds: frozenset[str]  # empty: all


class WordList(NamedTuple):
    habits: list[Habit]
    exceptions: list[tuple[str, str]]  # part of the path, part of the passage
    base_commit: str
    max_subject: int


def read_word_list() -> WordList:
    table = tomllib.loads(WORDS.read_text())
    habits = [
        Habit(
            entry["name"],
            re.compile(entry["pattern"], re.IGNORECASE),
            entry["better"],
            frozenset(entry.get("kinds", ())),
        )
        for entry in table["habit"]
    ]
    exceptions = [(entry["path"], entry["text"]) for entry in table.get("exception", ()) if entry["reason"]]
    return WordList(habits, exceptions, table["base_commit"], table["max_subject"])


def strip_code(text: str) -> str:
    return re.sub(r"(`+)[^`]*\1", "`code`", text)


def split_lines(text: str, first_line: int) -> list[tuple[int, str]]:
    """Return the lines of a docstring with their numbers, without the code of examples (>>> and ...)."""
    lines = inspect.cleandoc(text).split("\n")
    return [
        (first_line + index, line.strip())
        for index, line in enumerate(lines)
        if line.strip() and not line.lstrip().startswith((">>>", "... "))
    ]


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with {} for its expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def is_sentence(text: str) -> bool:
    """Return whether a string is prose, and not a key, a path, a pattern or code."""
    is_code = re.search(r"^\s*(import|from|def|class) |[=!]= |\\[bdsw]|\(\?|://|;\n", text, flags=re.MULTILINE)
    return text.count(" ") >= 2 and not is_code


def read_python(source: str) -> Iterator[Passage]:
    tree = ast.parse(source)
    docstrings: set[int] = set()
    inside_f_string: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and (text := text_of(first.value)) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
                yield Passage("docstring", [(n, strip_code(t)) for n, t in split_lines(text, first.lineno)])
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Passage("test name", [(node.lineno, node.name.removeprefix("test_").replace("_", " "))])
        if isinstance(node, ast.JoinedStr):
            inside_f_string.update(id(child) for child in ast.walk(node) if child is not node)
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inside_f_string:
            continue
        if (text := text_of(node)) and is_sentence(text):
            yield Passage("message", [(node.lineno, strip_code(" ".join(text.split())))])  # type: ignore[attr-defined]
    comments = [
        (token.start[0], strip_code(token.string.lstrip("#").strip()))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("#!")
    ]
    yield from group_comments(comments)


def group_comments(comments: list[tuple[int, str]]) -> Iterator[Passage]:
    """Join the comments of consecutive lines into one passage."""
    block: list[tuple[int, str]] = []
    for line, text in comments:
        if block and line != block[-1][0] + 1:
            yield Passage("comment", block)
            block = []
        block.append((line, text))
    if block:
        yield Passage("comment", block)


def read_markdown(source: str) -> Iterator[Passage]:
    paragraph: list[tuple[int, str]] = []
    in_code = False
    for number, line in enumerate(source.split("\n"), start=1):
        is_fence = line.lstrip().startswith("```")
        starts_item = re.match(r"\s*(?:[-*|#>]|\d+\.)\s?", line)
        if paragraph and (is_fence or not line.strip() or starts_item):
            yield Passage("page", paragraph)
            paragraph = []
        in_code ^= is_fence
        if line.strip() and not in_code and not is_fence:
            paragraph.append((number, strip_code(line[starts_item.end() :] if starts_item else line).strip()))
    if paragraph:
        yield Passage("page", paragraph)


def read_toml(source: str) -> Iterator[Passage]:
    """Read the values of a TOML file that are sentences, such as the description of a recipe."""
    values: list[object] = [tomllib.loads(source)]
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and is_sentence(value):
            line = source.count("\n", 0, max(0, source.find(value[:30].split("\n")[0]))) + 1
            yield Passage("message", [(line, strip_code(" ".join(value.split())))])


def read_comments(source: str, mark: str) -> Iterator[Passage]:
    lines = enumerate(source.split("\n"), start=1)
    found = ((number, re.search(rf"(?:^|\s){mark}+ (.*)", line)) for number, line in lines)
    yield from group_comments([(number, strip_code(match[1])) for number, match in found if match])


def read_passages(path: Path) -> Iterator[Passage]:
    if path.suffix == ".py":
        yield from read_python(path.read_text())
    elif path.suffix == ".md":
        yield from read_markdown(path.read_text())
    elif path.suffix in C_COMMENTS:
        yield from read_comments(path.read_text(), r"(?://|/\*)")
    elif path.suffix in HASH_COMMENTS:
        yield from read_comments(path.read_text(), "#")
        if path.suffix == ".toml":
            yield from read_toml(path.read_text())


def list_files(root: Path, paths: list[Path]) -> list[Path]:
    """Return the files with prose: below `paths`, or in the whole checkout; never those that git ignores."""
    if not paths:
        paths = [root / folder for folder in FOLDERS] + [path for path in root.iterdir() if path.is_file()]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    known = {".py", ".md", *C_COMMENTS, *HASH_COMMENTS}
    return [
        file
        for file in files
        if file.is_file() and file.suffix in known and is_ours(file.resolve().relative_to(root.resolve()))
    ]


def is_ours(path: Path) -> bool:
    in_requirements = path.parts[0] == "requirements" or (path.suffix == ".txt" and path.parts[0] != ".ci")
    generated = path.as_posix() in IGNORED or path.name in ("LICENSE", ".gitignore") or "embedded" in path.parts
    return not in_requirements and not generated and "__pycache__" not in path.parts


def check(path: str, passages: Iterator[Passage], words: WordList) -> Iterator[Finding]:
    for passage in passages:
        text = passage.text
        if any(where in path and kept in text for where, kept in words.exceptions):
            continue
        for habit in words.habits:
            if habit.kinds and passage.kind not in habit.kinds:
                continue
            for match in habit.pattern.finditer(text):
                yield Finding(path, passage.line_at(match.start()), habit.name, match[0].strip(" ,"), habit.better)


def check_subjects(words: WordList) -> Iterator[Finding]:
    """Check the subjects of commits after the base; none in an archive or a shallow clone, which do not have it."""
    command = ["git", "-C", str(ROOT), "log", "--format=%h %s", f"{words.base_commit}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True)
    for line in log.stdout.splitlines() if log.returncode == 0 else ():
        commit, _, subject = line.partition(" ")
        if len(subject) > words.max_subject:
            better = f"at most {words.max_subject} characters"
            yield Finding(commit, 0, "a long commit subject", f"{len(subject)} characters", better)
        if subject.endswith(".") or re.match(r"\w+(?:ed|ing)\b", subject):
            yield Finding(commit, 0, "a commit subject that is not an imperative", subject, "Add, Fix, Remove ...")
        yield from check(commit, iter([Passage("subject", [(0, subject)])]), words)


def unpack(commit: str, folder: str) -> Path:
    """Write the tree of a commit into a folder."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return Path(folder)


def find(root: Path, paths: list[Path], words: WordList) -> list[Finding]:
    files = list_files(root, paths)
    return [
        finding
        for file in files
        for finding in check(file.resolve().relative_to(root.resolve()).as_posix(), read_passages(file), words)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--counts", action="store_true", help="print the number of each habit")
    parser.add_argument("--at", metavar="COMMIT", help="check the tree of a commit")
    args = parser.parse_args()
    words = read_word_list()
    with tempfile.TemporaryDirectory() as folder:
        findings = find(unpack(args.at, folder) if args.at else ROOT, args.paths, words)
    if not args.at and not args.paths:
        findings += check_subjects(words)
    if args.counts:
        counts = Counter(finding.habit for finding in findings)
        for habit in words.habits:
            print(f"{counts.pop(habit.name, 0):6}  {habit.name}")
        for name, count in counts.items():
            print(f"{count:6}  {name}")
        print(f"{len(findings):6}  in all")
        return
    for finding in findings:
        print(f'{finding.path}:{finding.line}: "{finding.words}": {finding.habit}; write: {finding.better}')
    sys.exit(f"{len(findings)} habits to change; exceptions go into {WORDS.name}" if findings else 0)


if __name__ == "__main__":
    main()
