"""A real headless Chromium, driven over its DevTools protocol.

::

    async with Chromium.started(tmp_path) as page:
        await page.open("http://127.0.0.1:9003/")
        await page.until("document.querySelector('tr') !== null")
        (tmp_path / "page.png").write_bytes(await page.screenshot(1300))
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import pytest

from extproc.processes import Process

_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")

_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-pings",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    # Whatever it might still want: no name but this machine's address leads anywhere.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--no-proxy-server",
)


def find_chromium() -> str:
    """Skips the test where there is none, except on CI."""
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    missing = "needs Chromium (Debian: apt-get install chromium)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


class PageError(Exception):
    """A script failed, or what was waited for did not come."""


class Chromium:
    """One page of one browser. Made by :meth:`started`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.complaints: list[str] = []
        """What the console got: uncaught errors, violations of the page's policy, failed requests."""
        self.requested: list[str] = []
        """Every URL that the page has asked for."""

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, folder: Path) -> AsyncIterator[Self]:
        """``folder`` takes the profile, which must not exist yet, and the browser's log."""
        profile = folder / "chromium"
        announced = profile / "DevToolsActivePort"
        command = [find_chromium(), *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]

        def ready() -> bool:
            return announced.exists() and announced.read_text().count("\n") == 1

        async with contextlib.AsyncExitStack() as stack:
            process = Process(command, log=folder / "chromium.log", name="chromium", ready=ready, ready_timeout_s=90)
            await stack.enter_async_context(process)
            port = announced.read_text().split("\n")[0]
            client = await stack.enter_async_context(aiohttp.ClientSession())
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (target,) = [target for target in await answer.json() if target["type"] == "page"]
            socket = await stack.enter_async_context(
                client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0, autoping=True)
            )
            page = cls(socket)
            stack.push_async_callback(page._close)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page

    async def _close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol. Raises PageError."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], 60)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self) -> None:
        async for message in self._socket:
            value = json.loads(message.data)
            if waiting := self._answers.pop(value.get("id", 0), None):
                waiting.set_result(value)
            elif "method" in value:
                self._note(value["method"], value["params"])

    def _note(self, event: str, told: dict[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(argument.get("value")) for argument in told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["entry"]["text"])

    # ---- the page ----

    async def open(self, url: str) -> None:
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise PageError(f"{url}: {answer['errorText']}")
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, which may be a promise, as JSON has it. Raises PageError where it fails."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(answer["exceptionDetails"].get("exception", {}).get("description", "the script failed"))
        return answer["result"].get("value")

    async def until(self, script: str, within_s: float = 30.0) -> Any:
        """The expression's first value that is true. Raises PageError."""
        try:
            async with asyncio.timeout(within_s):
                while not (value := await self.evaluate(script)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise PageError(f"{script} did not come true") from None
        return value

    async def resize(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, width: int) -> bytes:
        """The whole page at that width, as PNG."""
        await self.resize(width, 600)
        height = await self.evaluate("Math.ceil(document.documentElement.getBoundingClientRect().height)")
        await self.resize(width, height)
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])
