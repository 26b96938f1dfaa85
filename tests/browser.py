"""Chromium without a window, driven over the pipe of its DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_SECONDS = 20
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_SHIFT = 8


class Browser:
    """A browser process.

    Args:
        profile: an empty folder for what it writes.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --mute-audio"
        arguments = [CHROMIUM, *options.split(), f"--user-data-dir={profile}"]
        arguments += [
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-background-networking",
        ]
        # the pipe's ends are to be 3 and 4, and may be either already
        ends = [(os.POSIX_SPAWN_DUP2, reads, 103), (os.POSIX_SPAWN_DUP2, writes, 104)]
        ends += [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4)]
        log = (os.POSIX_SPAWN_OPEN, 2, str(profile / "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        self._pid = os.posix_spawn(
            CHROMIUM, arguments, os.environ, file_actions=[*ends, log], setsid=True
        )
        os.close(reads)
        os.close(writes)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self.problems: dict[str, list[str]] = {}
        Thread(target=self._listen, daemon=True).start()

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and what it returns."""
        number = next(self._numbers)
        answer = self._answers[number] = Queue()
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        try:
            told = answer.get(timeout=_SECONDS)
        except Empty:
            raise TimeoutError(f"{method}: no answer of the browser") from None
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)

    def _listen(self) -> None:
        with open(self._from, "rb") as pipe:  # noqa: PTH123  a descriptor
            rest = b""
            while part := pipe.read1(1 << 20):
                *messages, rest = (rest + part).split(b"\0")
                for message in messages:
                    self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
        elif message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
            content = message["params"]
            entry = content.get("entry") or content["exceptionDetails"]
            text = f"{entry.get('text')} {entry.get('url')} {entry.get('exception', '')}"
            self.problems.setdefault(message["sessionId"], []).append(text)


class Page:
    """A page of a browser, with storage of its own.

    Args:
        browser: that shows it.
        url: to open; may be reloaded.
        width, height: in CSS pixels.
        features: of media queries, as {"prefers-color-scheme": "dark"}.
    """

    def __init__(
        self,
        browser: Browser,
        url: str,
        width: int = 1100,
        height: int = 760,
        features: dict[str, str] | None = None,
    ) -> None:
        self._browser, self._url = browser, url
        context = browser.ask("Target.createBrowserContext")["browserContextId"]
        target = browser.ask("Target.createTarget", url="about:blank", browserContextId=context)
        self._target = target["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        media = [{"name": name, "value": value} for name, value in (features or {}).items()]
        self.ask("Emulation.setEmulatedMedia", features=media)
        self.open()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    @property
    def problems(self) -> list[str]:
        """Exceptions of scripts, and what the browser's log holds against the page."""
        return self._browser.problems.get(self._session, [])

    def open(self) -> None:
        """Open the page, or once more with what it has stored."""
        self.evaluate("window.isOld = true")
        self.ask("Page.navigate", url=self._url)
        self.wait("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; that of a promise is awaited."""
        told = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"not true in {_SECONDS} s: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """That of the first such element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def all(self, selector: str, of_element: str) -> list[Any]:
        """A JavaScript expression of each such element, which it calls `e`."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{found}.map((e) => {of_element})"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first such element that is shown."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].find(e => e.offsetParent)"
        script = (
            f"(e => (e.scrollIntoView({{block: 'nearest'}}), e.getBoundingClientRect()))({found})"
        )
        box = self.evaluate(f"JSON.parse(JSON.stringify({script}))")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        common["modifiers"] = _SHIFT if shift else 0
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> None:
        """What is shown, as PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser as long as the block runs."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
