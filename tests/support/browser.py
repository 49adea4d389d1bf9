"""Headless Chromium, controlled through two pipes: screenshots, console messages and network requests of a page.

python -m tests.support.browser page.html shot.png --width 390 --dark
"""

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 5.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Page:
    """A tab.  Every call waits for its answer and stores the events that arrive meanwhile."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.pending, self.number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self.to_browser, content) :]
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            content = os.read(self.from_browser, 1 << 20)
            assert content, "the browser exited"
            self.pending += content
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def open(self, path: Path, width: int = 1280, dark: bool = False) -> None:
        """Open a page and wait until it is loaded."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def console_messages(self) -> list[str]:
        """Return console messages, exceptions and violations of the content security policy."""
        self.run("0")  # events arrive in order: earlier ones are stored when this returns
        messages = []
        for event in self.events:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                messages.append(str(given["exceptionDetails"]))
            elif method == "Log.entryAdded":
                messages.append(given["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                messages.append(str(given["args"]))
        return messages

    def requests(self) -> list[str]:
        """Return the addresses that the page requested, without data: URLs."""
        self.run("0")
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        options: dict[str, Any] = {"captureBeyondViewport": True}
        if clip is None:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        shot = self.call("Page.captureScreenshot", clip={**clip, "scale": 1}, **options)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    assert CHROMIUM
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads from descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}', CHROMIUM, *FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        os.close(write_end)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)  # Chromium and its children then exit
            os.close(from_browser)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--part", help="CSS selector: take a screenshot of only that element")
    given = parser.parse_args()
    with browser() as page:
        page.open(given.page, given.width, given.dark)
        box = given.part and page.run(
            f"(() => {{const b = document.querySelector({given.part!r}).getBoundingClientRect();"
            "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}})()"
        )
        page.screenshot(given.out, box or None)
        print(page.console_messages(), page.requests())
