"""Debian's Chromium, and what a page of it must never do."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.doors.http.pages.plain_station import PlainStation, Served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
KIOSK, PHONE, DESK = (1024, 768), (390, 844), (1920, 1080)


@dataclass
class Opened:
    """A page of the station in a browser, with what it said and whom it asked."""

    page: Page
    served: Any  # has a `url`
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    under_way: set[Any] = field(default_factory=set)  # requests for the state: one at a time

    @property
    def station(self) -> PlainStation:
        return self.served.station

    def sign_in(self, name: str = "anna") -> None:
        answer = self.page.context.request.post(f"{self.served.url}/api/session", data={"token": f"{name}-secret"})
        assert answer.ok, answer.text()

    def go(self, path: str = "/") -> Page:
        self.page.goto(self.served.url + path)
        self.page.locator("main > *").first.wait_for()
        return self.page

    def elsewhere(self) -> list[str]:
        return [url for url in self.asked if not url.startswith(self.served.url + "/")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, request) -> Iterator[Opened]:
    """A station of the kind that the test asks for by ``@pytest.mark.parametrize(..., indirect=True)``, else busy."""
    served = Served(PlainStation(getattr(request, "param", "busy")))
    context = browser.new_context(viewport={"width": KIOSK[0], "height": KIOSK[1]}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(20_000)
    opened = Opened(page, served)
    opened.sign_in()
    page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    page.on("dialog", lambda dialog: opened.wrong.append(f"dialog: {dialog.message}"))
    page.on("console", lambda told: opened.wrong.append(told.text) if told.type in ("error", "warning") else None)
    page.on("request", lambda request: opened.asked.append(request.url))
    page.on("request", lambda request: opened.under_way.add(request) if request.url.endswith("/state") else None)
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda request: opened.under_way.discard(request))
    yield opened
    context.close()
    served.stop()
