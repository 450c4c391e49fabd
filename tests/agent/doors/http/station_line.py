"""A line whose agent runs as `coserve serve` does, with its station's pages at a port of this machine, and a browser's
page that notes what it saw and when."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import yaml

from agent.config import read_line
from agent.demo.line import crops_of
from agent.demo.rendering.render import render_board
from agent.records.result_reader import ResultReader
from agent.records.truth.shadow_answers import read_comparison
from tests.agent.service.fake_line import FakeLine, picture
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

COMMAND = "from coserve import main\nmain()"
ROOT = Path(__file__).parents[4]
NOTED = """
window.noted = {ng: {}, interactiveMs: null};
new MutationObserver(() => {
  for (const tile of document.querySelectorAll(".tile.NG")) noted.ng[tile.title.split(" · ")[0]] ??= Date.now();
  if (document.querySelector(".station")) noted.interactiveMs ??= performance.now();
}).observe(document, {subtree: true, childList: true, attributes: true});
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class StationLine:
    """An agent of a line file in its folder, at one address through all its lives."""

    def __init__(self, folder, forks):
        self.folder, self.file, self._forks = folder, folder / "line.yaml", forks
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.address}"
        self.agent = None

    def write(self, document):
        tokens = {}
        for name, role in (("anna", "operate"), ("eve", "read"), ("max", "admin")):
            (self.folder / f"{name}.token").write_text(f"{name}-secret-token\n")
            tokens[name] = {"role": role, "file": f"./{name}.token"}
        document["api"] = {"grpc": [], "http": [self.address], "tokens": tokens}
        self.file.write_text(yaml.safe_dump(document, sort_keys=False))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        self.agent = self._forks.start(COMMAND, "serve", self.file, log=self.folder / "agent.log")
        until(self.is_ready, lambda: self.agent.report)

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self):
        if self.agent is not None:
            self.agent.kill()

    def printed(self, *words):
        """The JSON that a command prints."""
        done = self._forks.run(COMMAND, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def committed_at(self, serial):
        """Waits until a board is in the results file; seconds since the epoch, just after its commit."""
        reader = ResultReader(read_line(self.file, {}).results_file)
        until(lambda: any(row.serial == serial for row in reader.boards(limit=4)))
        return time.time()

    def shadow_has_judged(self):
        """Waits until the shadow has judged what its expert has."""
        config = read_line(self.file, {})
        shadow = config.catalog.graph.shadows[self.EXPERT]
        judged = sum(self.EXPERT in row.experts for row in ResultReader(config.results_file).query())
        until(lambda: (found := read_comparison(config.results_file, self.EXPERT, shadow)) and found.images == judged)


class FakeStation(StationLine):
    """Two fake experts; the first calls every part bad, and its shadow calls none so."""

    EXPERT = "cls/f0"

    def __init__(self, folder, forks):
        super().__init__(folder, forks)
        self.fakes = FakeLine(folder)
        self.fakes.add_expert(2, has_route=False)
        self.fakes.document["experts"][self.EXPERT]["shadow"] = "cls/f2"
        self.fakes.fake(0, label="bad")
        self.fakes.fake(2, weight_bytes=900_000)
        self.fakes.watch()
        self.fakes.document["boards"]["main"]["takt_s"] = 5
        self.write(self.fakes.document)

    def make_board(self, serial, ref="R1"):
        for name in (f"{serial}_c0_{ref}.png", f"{serial}_c1_R2.png"):
            self.fakes.drop(name, picture((200, 60, 20), (64, 64)))


class DemoStation(StationLine):
    """The line of `coserve demo`, trained once; a classifier is in its own shadow. Half of all parts are bad."""

    EXPERT = "cls/capacitor-0402"

    def __init__(self, folder, forks, demo):
        kept_out = shutil.ignore_patterns("results.db*", "attempts.log", "*.lock", "inbox", "drop")
        shutil.copytree(demo, folder, copy_function=os.link, ignore=kept_out)
        (folder / "inbox").mkdir()
        super().__init__(folder, forks)
        document = yaml.safe_load(self.file.read_text())
        self.file.unlink()  # a link, as all files here
        self.write(with_shadow(document, self.EXPERT))
        self._seed = 0

    def make_board(self, serial, defect_rate=0.5):
        self._seed += 1
        board = render_board(9000 + self._seed, serial, defect_rate, defect_rate)
        (self.folder / "aside").mkdir(exist_ok=True)
        for crop in crops_of(board):
            write_png(self.folder / "aside" / crop.file, crop.pixels)
            (self.folder / "aside" / crop.file).rename(self.folder / "inbox" / crop.file)


def with_shadow(document, expert):
    document["experts"][expert]["shadow"] = f"{expert}-next"
    document["experts"][f"{expert}-next"] = {
        key: value for key, value in document["experts"][expert].items() if key != "shadow"
    }
    return document


def write_png(path, pixels):
    from PIL import Image

    Image.fromarray(pixels).save(path)


def make_demo(folder):
    subprocess.run(
        [sys.executable, "-m", "coserve", "demo", "--dir", folder / "demo", "--json"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=800,
    )  # fmt: skip


@dataclass
class Watched:
    """A page of a browser: what went wrong on it, whom it asked, and what it noted."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self):
        page = self.page
        page.set_default_timeout(30_000)
        page.add_init_script(NOTED)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        page.on("console", lambda told: self.wrong.append(told.text) if told.type in ("error", "warning") else None)
        page.on("request", lambda request: self.asked.append(request.url))

    def go(self, path="/"):
        self.page.goto(self.url + path)
        self.page.locator("main > *").first.wait_for()
        return self.page

    def sign_in(self, name="anna"):
        answer = self.page.context.request.post(f"{self.url}/api/session", data={"token": f"{name}-secret-token"})
        assert answer.ok, answer.text()

    def noted(self):
        return self.page.evaluate("noted")

    @property
    def elsewhere(self):
        return [url for url in self.asked if not url.startswith(self.url + "/")]
