"""A line that has judged images and whose results people reviewed, without an agent."""

from contextlib import closing
from datetime import UTC, datetime, time

import pytest
from PIL import Image

from agent.records.result_writer import ResultStore
from agent.records.station.reviews import Reviews
from agent.records.station.shifts import Shifts
from agent.records.verdict import Step
from experts.expert import BoundingBox, Verdict
from tests.agent.line_files import LineFile, expert, route
from tests.lines import NOON, result
from tests.waiting import settled

NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


class ReviewedLine(LineFile):
    """A classifier with two labels before a detector with three. Images lie in the archive."""

    def __init__(self, folder):
        detector = expert("shift.safetensors", "yolo11n", 64, labels=["aligned", "shifted", "tilted"])
        first = expert("r.safetensors", "resnet18", labels=["ok", "missing"])
        steps = route("cls/r") + route("det/shift", passing=["aligned"])
        super().__init__(folder, experts={"cls/r": first, "det/shift": detector}, routes={"r": steps})
        self.write()
        (folder / "state" / "images").mkdir(parents=True)

    def keep(self, name, size=(40, 20), orientation=None):
        """A kept image, red on its left half and blue on its right."""
        picture = Image.new("RGB", size, (0, 0, 255))
        picture.paste((255, 0, 0), (0, 0, size[0] // 2, size[1]))
        exif = Image.Exif()
        if orientation is not None:
            exif[0x0112] = orientation
        picture.save(self.folder / "state" / "images" / name, exif=exif)
        return name

    def judge(self, *rows):
        """Store results: (verdict, keys of the result)."""
        with closing(ResultStore(self.folder / "state" / "results.db")) as store:
            for number, (verdict, said) in enumerate(rows, start=1):
                store.record(result(f"k{number}", verdict, arrived_at=NOON, **said))
            settled(store)

    def review(self, *said):
        """Store reviews: (number of the result, person's verdict, further fields)."""
        with closing(ResultStore(self.folder / "state" / "results.db")) as store:
            reviews = Reviews(store, Shifts((time(6),), UTC), lambda: NOW)
            for seq, verdict, more in said:
                reviews.add(seq, Verdict(verdict), "ann", **more)


def step(name, label, *boxes):
    """A step of a result; ``boxes``: (label, left, top, right, bottom)."""
    told = tuple(BoundingBox(of, 0.9, *corners) for of, *corners in boxes)
    return Step(name, label, 0.9, told, "ab")


@pytest.fixture
def line(tmp_path):
    return ReviewedLine(tmp_path)
