"""The pages over a running agent in a process of its own: verdicts are seen, reviewed, and there after kill -9."""

from __future__ import annotations

import re
import signal
import socket

import pytest
from playwright.sync_api import expect

from tests.agent.service.fake_line import SERVED, FakeLine
from tests.agent.web.pages.conftest import Opened
from tests.waiting import until

TOKEN = "secret-of-anna"


class Agent:
    """A line of fake experts, of which the first finds each part bad, served at a port."""

    def __init__(self, folder, forks):
        self.line = FakeLine(folder)
        self.line.watch()
        self.line.fake(0, label="bad")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "anna").write_text(TOKEN)
        tokens = {"anna": {"role": "admin", "file": "./anna"}}
        self.line.document["api"] = {"http": self.address, "grpc": [], "tokens": tokens}
        self.line.document["records"] = {"images": "all"}
        self._forks = forks
        self.start()

    @property
    def url(self):
        return f"http://{self.address}"

    def start(self):
        self.fork = self._forks.start(SERVED, self.line.write())
        until(self._answers, lambda: self.fork.told)

    def _answers(self):
        assert self.fork.poll() is None
        host, _, port = self.address.partition(":")
        with socket.socket() as caller:
            return caller.connect_ex((host, int(port))) == 0

    def judge(self, serial):
        before = len(self.line.rows) if (self.line.folder / "state" / "results.db").exists() else 0
        for part in ("c0_R1", "c1_R2"):
            self.line.drop(f"{serial}_{part}.png")
        until(lambda: len(self.line.rows) == before + 2)


@pytest.fixture
def agent(tmp_path, forks):
    agent = Agent(tmp_path, forks)
    yield agent
    agent.fork.kill()


@pytest.fixture
def opened(browser, agent):
    context = browser.new_context(viewport={"width": 1024, "height": 768}, reduced_motion="reduce")
    assert context.request.post(f"{agent.url}/api/session", data={"token": TOKEN}).ok
    page = context.new_page()
    page.set_default_timeout(20_000)
    expect.set_options(timeout=20_000)
    opened = Opened(page, agent)
    page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    page.on("console", lambda told: opened.wrong.append(told.text) if told.type in ("error", "warning") else None)
    page.on("request", lambda request: opened.asked.append(request.url))
    yield opened
    context.close()


def test_an_ng_board_appears_is_reviewed_and_both_are_there_after_kill_9(agent, opened):
    page = opened.go("/")
    agent.judge("S1")
    expect(page.locator(".tile")).to_have_text(re.compile("NG *S1"))
    case = page.locator("section.case")
    expect(case).to_contain_text("bad")
    expect(case.locator(".picture img")).to_have_js_property("naturalWidth", 8)
    page.get_by_label("reason", exact=True).fill("glare")
    page.get_by_role("button", name="False call").click()
    expect(case.get_by_role("status")).to_contain_text(re.compile("false call by anna at .* glare"))
    agent.fork.send_signal(signal.SIGKILL)
    expect(page.locator(".judging b")).to_have_text("NO ANSWER")
    agent.fork.wait(20)
    agent.start()
    expect(page.locator(".judging b")).not_to_have_text("NO ANSWER")
    expect(case.get_by_role("status")).to_contain_text("false call by anna")
    agent.judge("S2")
    expect(page.locator(".tile").first).to_have_text(re.compile("NG *S2"))


def test_each_page_shows_a_running_line_without_an_error(agent, opened):
    agent.judge("S1")
    shown = {
        "/": "S1", "/review?verdict=NG": "bad", "/board/1": "run 1", "/expert/cls/f0": "takes requests",
        "/engine": "cls/f0", "/line": "is being served",
    }  # fmt: skip
    for path, text in shown.items():
        page = opened.go(path)
        expect(page.locator("main")).to_contain_text(text)
        expect(page.get_by_text("asking the agent…")).to_have_count(0)
        page.keyboard.press("w")
    expect(page.locator("main")).to_contain_text("nothing yet")
    assert opened.wrong == []
    assert opened.elsewhere() == []
