"""A real browser, Chromium without a window, that tests tell what to do (Chrome's DevTools protocol)."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


class Page:
    """A tab of the browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []
        """What the browser had to say on its own, errors among it."""

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(timeout=60))).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value once it is true."""
        end = time.monotonic() + 60
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script}: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def choose(self, selector: str, file: Path) -> None:
        """Put a file into a form's field."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


@contextmanager
def browser(folder: Path, url: str) -> Iterator[Page]:
    """A tab at a URL. The browser keeps its files below `folder`."""
    assert CHROMIUM
    profile = folder / "profile"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET]
    command = [CHROMIUM, *options, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with (
        (folder / "browser.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            place, end = profile / "DevToolsActivePort", time.monotonic() + 60
            while not (place.exists() and place.read_text().count("\n")):
                assert time.monotonic() < end
                time.sleep(0.05)
            with urlopen(f"http://127.0.0.1:{place.read_text().split()[0]}/json", timeout=60) as answer:
                [tab] = [one for one in json.load(answer) if one["type"] == "page"]
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
                    page.call(f"{domain}.enable")
                page.call("Page.navigate", url=url)
                yield page
        finally:
            process.kill()
