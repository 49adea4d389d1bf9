"""The page in a real browser: no console errors, requests, clipped text or low contrast."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megabatch.report.page import write_report
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.made_up_run import NAMES, make_run

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
LONG_NAMES = ["<script>alert(1)</script>", "a class with a very long name " * 8, *NAMES[2:]]
MIN_CONTRAST = 4.5  # of text, by WCAG

# Boxes of all visible texts, with their colour and background.
TEXTS = """(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const holder = node.parentElement, range = document.createRange();
    const unseen = "script, style, title, desc, details:not([open]) > :not(summary), #tip";
    if (!node.textContent.trim() || holder.closest(unseen)) continue;
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      const scroll = holder.closest(".scroll, pre");
      const inSvg = holder.namespaceURI.endsWith("svg");
      const style = getComputedStyle(holder);
      let behind = null, seen = holder;
      if (inSvg) {
        const middle = [box.x + box.width / 2, box.y + box.height / 2];
        const under = [...holder.closest("svg").querySelectorAll("rect")].filter((rect) => {
          const b = rect.getBoundingClientRect();
          return b.left <= middle[0] && middle[0] <= b.right && b.top <= middle[1] && middle[1] <= b.bottom;
        }).pop();
        if (under) {
          const fill = getComputedStyle(under);
          behind = [fill.fill, Number(fill.fillOpacity)];
        }
      }
      let ground = "rgba(0, 0, 0, 0)";
      for (; seen && ground === "rgba(0, 0, 0, 0)"; seen = seen.parentElement) {
        ground = getComputedStyle(seen).backgroundColor;
      }
      found.push({
        text: node.textContent.trim().slice(0, 40), left: box.left, right: box.right, top: box.top + scrollY,
        bottom: box.bottom + scrollY, colour: inSvg ? style.fill : style.color, ground, behind, inScroll: !!scroll,
      });
    }
  }
  return found;
})()"""
CHARTS = """[...document.querySelectorAll(".plot > svg")].map((svg) => ({
  name: svg.querySelector("title").textContent,
  about: svg.querySelector("desc").textContent,
  marks: svg.querySelectorAll("path, rect, circle").length,
  width: svg.getBoundingClientRect().width,
  drawn: [...svg.querySelectorAll("path")].every((path) => path.getTotalLength() > 0),
}))"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "a-run-of-one-host", steps=400, ranks=4)
    large = make_run(folder / "large", steps=1200, ranks=256, classes=[*LONG_NAMES, *map(str, range(90))], seed=2)
    small = make_run(folder / "names", steps=60, ranks=2, classes=LONG_NAMES, status=None, learning_rate=8.0)
    return [
        write_report([one]),
        write_report([large]),
        write_report([small]),
        write_report([one, large, small], folder / "several.html"),
    ]


def colour(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text[text.index("(") + 1 : -1].replace("/", ",").split(","))


def luminance(rgb: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: dict[str, Any]) -> float:
    ground = colour(text["ground"])
    if text["behind"]:
        fill, opacity = colour(text["behind"][0]), text["behind"][1]
        ground = tuple(opacity * over + (1 - opacity) * under for over, under in zip(fill, ground, strict=False))
    light, dark = sorted((luminance(colour(text["colour"])), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def overlaps(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of texts that overlap by more than `hair` pixels."""
    hair = 1.5
    ordered = sorted((text for text in texts if not text["inScroll"]), key=lambda text: text["top"])
    found = []
    for place, one in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if other["top"] >= one["bottom"] - hair:
                break
            if (
                min(one["right"], other["right"]) - max(one["left"], other["left"]) > hair
                and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 2 * hair
            ):
                found.append((one["text"], other["text"]))
    return found


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_width_of_a_phone_and_of_a_screen(tab: Page, pages: list[Path], width: int) -> None:
    for path in pages:
        tab.open(path, width)
        assert tab.console_messages() == []
        assert tab.requests() == [path.resolve().as_uri()]
        assert tab.run("document.documentElement.scrollWidth") <= width, path
        charts = tab.run(CHARTS)
        assert charts and all(chart["name"] and chart["about"] for chart in charts)
        assert all(chart["marks"] and chart["drawn"] and chart["width"] > 200 for chart in charts), charts
        texts = tab.run(TEXTS)
        assert len(texts) > 50
        cut = [text for text in texts if not text["inScroll"] and (text["left"] < 0 or text["right"] > width + 0.5)]
        assert not cut, path
        assert overlaps(texts) == [], path


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_enough_contrast(tab: Page, pages: list[Path], dark: bool) -> None:
    for path in (pages[0], pages[3]):
        tab.open(path, 1280, dark)
        texts = tab.run(TEXTS)
        assert {luminance(colour(text["ground"])) < 0.2 for text in texts} == {dark}
        poor = {(text["text"], round(contrast(text), 2)) for text in texts if contrast(text) < MIN_CONTRAST}
        assert not poor


def test_pointer_and_arrow_keys_show_values(tab: Page, pages: list[Path]) -> None:
    tab.open(pages[0], 1280)
    tab.run("document.querySelector('#loss .plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = tab.run("document.querySelector('#loss .plot > svg').getBoundingClientRect().toJSON()")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2, y=box["y"] + 50)
    text = tab.run("document.getElementById('tip').innerText")
    assert re.match(r"step (19|20)\d\s+training\s+[\d.]+\s+test\s+[\d.]+$", text), text
    for plot in ("#loss .plot", "#time-mean .plot", "#pipeline .plot", "#ranks-figure .plot", "#confusion .plot"):
        tab.run(f"document.querySelector('{plot}').focus()")
        shown = []
        for key in ("ArrowRight", "ArrowRight", "End"):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
            shown.append(
                tab.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
            )
        assert all(shown) and len(set(shown)) == 3, (plot, shown)
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert tab.run("document.getElementById('tip').hidden")
    assert tab.console_messages() == []
