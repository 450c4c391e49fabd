"""A served line of fakes, whose images are judged anew."""

import os

import pytest

from tests.agent.service.fake_line import FakeLine, picture
from tests.waiting import until


class ServedLine(FakeLine):
    """Images that its agent has judged, and the files that it filed."""

    def serve(self, *names, image=None):
        """Judge images of these names, and what lies in the inbox."""
        for name in names:
            self.drop(name, image)
        with self.served():
            until(lambda: self.unfiled() == 0)

    def unfiled(self):
        """Files of the inbox, claimed ones too, that are on no shelf yet."""
        places = ((os.path.relpath(place, self.inbox), names) for place, _, names in os.walk(self.inbox))
        return sum(len(names) for place, names in places if place.split("/")[0] not in {"done", "ng", "failed"})


@pytest.fixture
def line(tmp_path):
    return ServedLine(tmp_path)


@pytest.fixture
def served(line):
    """Six images: four of c0, two of c1, all OK; one that is no image, UNKNOWN."""
    line.watch(stale_after_s=0.5)
    line.drop("B9_c0_R9.png", b"no image at all")
    line.serve(*(f"B{number}_c{number // 4}_R{number}.png" for number in range(6)), image=picture())
    return line
