"""A headless Chromium used as a person would: keys, clicks, window width, light and dark mode."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SECONDS = 20.0
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
TYPED = {"Enter": "\r", "Tab": "\t"}
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-port=0", "--window-size=1300,900"),
)


class Browser:
    """One tab, through the DevTools protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._loop, self._socket, self._sent = loop, socket, 0
        self.errors: list[str] = []  # what the page's scripts have thrown, and what its policy has refused
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(asyncio.wait_for(self._ask(method, parameters), SECONDS))

    async def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)

    def look(self, width: int, height: int = 900, *, dark: bool = False, mobile: bool = False) -> None:
        """Sets the window size and the colour scheme."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + SECONDS
        while not (found := self.value(script)):
            assert time.monotonic() < end, f"{script}: {self.value('document.body.innerText')[:500]} {self.errors}"
            time.sleep(0.05)
        return found

    def press(self, *keys: str) -> None:
        for key in keys:
            facts = {"key": key, "code": key, "windowsVirtualKeyCode": CODES[key], "text": TYPED.get(key, "")}
            self.do("Input.dispatchKeyEvent", type="keyDown", **facts)
            self.do("Input.dispatchKeyEvent", type="keyUp", **facts)

    def click(self, across: float, down: float) -> None:
        """Clicks a point of the window, in pixels."""
        at = {"x": across, "y": down, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, **at)

    def write(self, text: str) -> None:
        self.do("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Saves the entire page as a PNG."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.do("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder."""
    profile = folder / "profile"
    process = subprocess.Popen(
        [CHROME, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    loop = asyncio.new_event_loop()
    try:
        session, socket = loop.run_until_complete(asyncio.wait_for(_connect(profile / "DevToolsActivePort"), SECONDS))
        try:
            yield Browser(loop, socket)
        finally:
            loop.run_until_complete(session.close())
    finally:
        process.kill()
        process.wait()
        loop.close()


async def _connect(file: Path) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    """Connects to the first tab."""
    while not file.exists() or len(file.read_text().split()) < 2:
        await asyncio.sleep(0.05)
    session, port = aiohttp.ClientSession(), file.read_text().split()[0]
    while True:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
        if tabs:
            return session, await session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0)
        await asyncio.sleep(0.05)
