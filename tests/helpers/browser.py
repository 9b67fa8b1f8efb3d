"""Chromium over the pipe of its DevTools protocol: open a page, evaluate JavaScript, press keys, take pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-quic --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
CONSOLE = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser, which ends with the block."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False):
        self.commands, self.answers = os.pipe(), os.pipe()
        # Chromium reads its commands from descriptor 3 and answers on descriptor 4.
        moved = f"exec {chromium()} {OPTIONS} --user-data-dir={profile} about:blank"
        redirected = f"3<&{self.commands[0]} 4>&{self.answers[1]}"
        self.process = subprocess.Popen(
            ["bash", "-c", f"{moved} {redirected}"],
            pass_fds=(self.commands[0], self.answers[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(self.commands[0])
        os.close(self.answers[1])
        self.reading = os.fdopen(self.answers[0], "rb", buffering=0)
        self.number, self.rest, self.session = 0, b"", ""
        self.messages: list[dict[str, Any]] = []  # what stands on the console
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Runtime.enable")
        self.call("Log.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.commands[1])
        self.process.kill()
        self.process.wait()
        self.reading.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands[1], json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = self.reading.read(1 << 20)
                assert part, "the browser has ended"
                self.rest += part
            line, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("method") in CONSOLE:
                self.messages.append(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path, until: str = "true") -> None:
        """Go to the page, until it is loaded and the expression holds."""
        self.call("Page.navigate", url=page.as_uri())
        self.wait(f"location.protocol === 'file:' && document.readyState === 'complete' && ({until})")

    def wait(self, condition: str) -> None:
        while not self.run(condition):
            time.sleep(0.02)

    def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def picture(self, file: Path, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))
