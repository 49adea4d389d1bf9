"""Any text is escaped."""

import json
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from megabatch.report.html import escape, json_block, tag


class Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@given(text=st.text())
def test_escaped_text_reads_back_without_unprintable_characters(text: str) -> None:
    read = Reader(tag("p", tag("b", text), title=text))
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    assert read.tags == ["p", "b"]
    assert read.text == shown
    assert read.attributes == [("title", shown)]
    assert escape(escape(text)) == escape(text)


@given(
    value=st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_block_cannot_end_its_element_and_reads_back(value: object) -> None:
    block = json_block(value)
    begin, end = '<script type="application/json">', "</script>"
    assert block.startswith(begin) and block.endswith(end)
    inside = block[len(begin) : -len(end)]
    assert not set(inside) & set("<>&")
    assert json.loads(inside) == json.loads(json.dumps(value))
