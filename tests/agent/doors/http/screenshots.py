"""Pictures of the station's pages over the demo line, at three sizes: `make screenshots`.

Writes them into the folder `pictures`, and docs/station.png, which the README shows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402  the tests' folder is found only now

from agent.demo.line import LINE_FILE  # noqa: E402
from tests.agent.doors.http.pages.conftest import CHROMIUM, DESK, KIOSK, PHONE  # noqa: E402
from tests.agent.doors.http.station_line import DemoStation, Watched, make_demo  # noqa: E402
from tests.forks import Forks  # noqa: E402

BOARDS = 9
DEFECT_RATE = 0.02
SIZES = {"kiosk": KIOSK, "phone": PHONE, "desk": DESK}
SHOWN = ROOT / "docs" / "station.png"


def boards_judged(station):
    for number in range(BOARDS):
        station.make_board(f"SN-{1041 + number}", DEFECT_RATE if number % 3 else 0.0)
        station.committed_at(f"SN-{1041 + number}")


def review_some(station):
    """A false call, and two agreed."""
    with httpx.Client(base_url=station.url, headers={"authorization": "Bearer anna-secret-token"}) as http:
        cases = http.get("/api/results", params={"verdict": "NG"}).json()["results"]
        for case, verdict in zip(cases[1:4], ("OK", "NG", "NG"), strict=False):
            http.post("/api/reviews", json={"result": case["seq"], "verdict": verdict}).raise_for_status()
        board = http.get("/api/boards", params={"verdict": "NG"}).json()["boards"][0]
    return {
        "station": "/", "review": "/review", "board": f"/board/{board['number']}",
        "expert": f"/expert/{station.EXPERT}",
        "engine": "/engine", "line": "/line",
    }  # fmt: skip


def take(browser, station, pages, folder):
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark") if size == "kiosk" else ("light",):
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
            )
            watched = Watched(context.new_page(), station.url)
            watched.sign_in()
            for name, path in pages.items():
                page = watched.go(path)
                page.get_by_text("asking the agent…").first.wait_for(state="detached")
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(500)  # for pictures to be drawn
                page.screenshot(path=folder / f"{name}-{size}{'-dark' * (theme == 'dark')}.png")
            assert watched.wrong == [], watched.wrong
            context.close()


def main(demo: Path, folder: Path) -> None:
    if not (demo / LINE_FILE).exists():
        make_demo(demo.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=demo.parent, prefix="screenshots-") as scratch:
        forks = Forks(Path(scratch))
        station = DemoStation(Path(scratch) / "line", forks, demo)
        try:
            station.start()
            boards_judged(station)
            pages = review_some(station)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                take(browser, station, pages, folder)
                browser.close()
        finally:
            station.stop()
            forks.close()
    with Image.open(folder / "station-kiosk.png") as picture:
        picture.convert("RGB").quantize(128).save(SHOWN, optimize=True)
    count, size_bytes = len(list(folder.iterdir())), SHOWN.stat().st_size
    sys.stdout.write(f"{count} pictures in {folder}, one of them in {SHOWN}: {size_bytes:,} bytes\n")


if __name__ == "__main__":
    main(*(ROOT / name for name in ("demo", "pictures")) if len(sys.argv) < 3 else map(Path, sys.argv[1:]))
