"""Headless Chromium, spoken to by the WebDriver protocol: HTTP and JSON on this machine."""

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "tab": "\ue004"}

_direct = build_opener(ProxyHandler({}))  # a proxy of the environment has no part in this


class Browser:
    """One window of one session."""

    def __init__(self, session: str) -> None:
        self.session = session

    def open(self, page: Path) -> None:
        _call(f"{self.session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments):
        """What the body of a JavaScript function returns."""
        body = {"script": script, "args": list(arguments)}
        return _call(f"{self.session}/execute/sync", body)

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, where the focus is."""
        values = [KEYS.get(key, key) for key in keys]
        steps = [{"type": kind, "value": v} for v in values for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        _call(f"{self.session}/actions", {"actions": actions})
        self.settle()

    def click(self, selector: str) -> None:
        """Clicks in the middle of an element, as a pointer does."""
        found = _call(f"{self.session}/element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        _call(f"{self.session}/element/{element}/click", {})
        self.settle()

    def settle(self) -> None:
        """Waits for the next picture."""
        script = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done))"
        _call(f"{self.session}/execute/async", {"script": script, "args": []})

    def devtools(self, command: str, **parameters):
        """A command of Chromium's own protocol."""
        return _call(f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """A window of this size, with a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.devtools("Emulation.setDeviceMetricsOverride", mobile=width < 700, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def log(self, kind: str) -> list[dict]:
        """What happened since the last call: `browser` is the console, `performance` the net."""
        return _call(f"{self.session}/se/log", {"type": kind})


@contextmanager
def browser(profile: Path):
    """A session of headless Chromium that can reach nothing outside this machine."""
    # The driver takes a free port and says which.
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            told = (re.search(r"on port (\d+)\.", line) for line in driver.stdout)
            port = next(found[1] for found in told if found)
            root = f"http://127.0.0.1:{port}/session"
            arguments = [
                "--headless=new",
                "--no-sandbox",  # which needs rights that a container does not give
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={profile}",
            ]
            wanted = {
                "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            answer = _call(root, {"capabilities": {"alwaysMatch": wanted}})
            session = f"{root}/{answer['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call(session, None, method="DELETE")
        finally:
            driver.terminate()


def _call(url: str, body, *, method: str = "POST"):
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _direct.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except HTTPError as error:
        with error:
            reason = json.load(error)["value"]["message"].splitlines()[0]
        raise RuntimeError(reason) from error
