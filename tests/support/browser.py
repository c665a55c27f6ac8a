"""A real browser, headless, spoken to by the Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol/)
over the WebSocket library that uvicorn brings. Debian's `chromium` is enough."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_LIMIT = 60.0
LIMIT = 60.0
"""Seconds that a condition may take; generous, because a busy machine draws slowly."""


class Page:
    """One tab. `errors`: whatever its console showed as one, uncaught exceptions and refusals of its policy too."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def _read(self) -> None:
        async for text in self._socket:
            said = json.loads(text)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
                continue
            match said["method"], said["params"]:
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    self.errors.append(details.get("exception", {}).get("description") or details["text"])
                case "Runtime.consoleAPICalled", {"type": "error" | "assert", "args": args}:
                    self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in args))
                case "Log.entryAdded", {"entry": {"level": "error", **entry}}:
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        said = await asyncio.wait_for(self._waiting[number], LIMIT)
        assert "error" not in said, (method, said)
        return said["result"]  # type: ignore[no-any-return]

    async def size(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def dark(self, dark: bool = True) -> None:
        value = "dark" if dark else "light"
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression. What it throws fails the test."""
        said = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, expression: str, limit: float = LIMIT) -> None:
        """Until it is true. What throws is not yet: the page may still be coming."""
        give_up_at = time.monotonic() + limit
        while True:
            said = await self.send("Runtime.evaluate", expression=f"Boolean({expression})", returnByValue=True)
            if "exceptionDetails" not in said and said["result"].get("value"):
                return
            assert time.monotonic() < give_up_at, f"{expression} is still {said}; errors: {self.errors}"
            await asyncio.sleep(0.05)

    async def click(self, selector: str) -> None:
        """As a person does: with the mouse, at the middle of what is there."""
        box = json.dumps(selector)
        await self.until(f"document.querySelector({box}) && !document.querySelector({box}).disabled")
        await self.value(f"document.querySelector({box}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        spot = await self.value(
            f"(() => {{ const r = document.querySelector({box}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", buttons=1, clickCount=1
            )

    async def type(self, selector: str, text: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, as far down as it goes (`whole`), or of what can be seen."""
        said = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(said["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Its one page, empty. `folder`: for the profile."""
    assert CHROMIUM is not None, "no chromium is installed; on Debian: apt-get install chromium"
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
    command = [CHROMIUM, *flags.split(), "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        file = folder / "DevToolsActivePort"
        give_up_at = time.monotonic() + _START_LIMIT
        while not file.exists() or len(file.read_text().split()) < 2:
            assert process.poll() is None, "the browser has ended"
            assert time.monotonic() < give_up_at, "the browser does not come up"
            await asyncio.sleep(0.05)
        port = int(file.read_text().split()[0])
        async with connect(await _first_page(port), max_size=None, proxy=None) as socket:
            page = Page(socket)
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
            finally:
                await page.close()
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _first_page(port: int) -> str:
    """Where it is spoken to."""
    give_up_at = time.monotonic() + _START_LIMIT
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT) as client:
        while True:
            tabs = (await client.get(f"http://127.0.0.1:{port}/json/list")).json()
            for tab in tabs:
                if tab["type"] == "page":
                    return str(tab["webSocketDebuggerUrl"])
            assert time.monotonic() < give_up_at, "the browser opens no page"
            await asyncio.sleep(0.05)
