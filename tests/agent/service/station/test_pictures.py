"""Pictures of results whose file changed after its verdict: never one board's picture under another's result."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.agent.service.fake_line import asked
from tests.agent.service.station.test_station import Web, shown, with_door
from tests.lines import order
from tests.pictures import encoded
from tests.waiting import until

RED, BLUE = (250, 0, 0), (0, 0, 250)


@pytest.fixture
def line(line):
    return with_door(line)


def bitmap(color, size=(8, 8)):
    """Files of one size have equally many bytes."""
    return encoded(Image.new("RGB", size, color), "BMP")


def overwrite(path, content):
    """In place, by a copier that keeps the time: name, inode, size and mtime stay."""
    seen = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert path.stat().st_size == seen.st_size


def test_overwritten_kept_file_is_reported_and_not_shown_for_the_earlier_result(line):
    line.watch(after="keep")
    with line.served() as service:
        web = Web(service)
        line.drop("B1_c0_R1.png", bitmap(RED))
        until(lambda: len(line.rows) == 1)
        assert shown(web, "/api/results/1/image").getpixel((0, 0)) == RED
        overwrite(line.inbox / "B1_c0_R1.png", bitmap(BLUE))
        for kind in ("image", "frame", "thumbnail"):
            message = web.error(f"/api/results/1/{kind}", status=404)["message"]
            assert "holds another image now than the one that was judged" in message
        until(lambda: len(line.rows) == 2)
        assert shown(web, "/api/results/2/image").getpixel((0, 0)) == BLUE


@pytest.mark.parametrize("after", ["keep", "move"])
def test_parts_of_a_frame_are_not_cut_from_the_earlier_frame_of_its_path(line, after):
    line.watch(pattern=r"(?P<board>[^_.]+)\.png", board_type="main", after=after)
    place = line.inbox / "B1.png"
    with line.served() as service:
        web = Web(service)
        line.drop("B1.png", bitmap(RED, (32, 16)))
        until(lambda: len(line.rows) == 2 and (after == "keep" or line.shelf("done")))
        assert shown(web, "/api/results/1/image").getpixel((0, 0)) == RED
        if after == "move":  # an operator takes the board off its shelf, and its path is used again
            (place,) = line.inbox.rglob("done/*/B1.png")
        place.unlink()
        line.drop("B1.png", bitmap(BLUE, (32, 16)))
        until(lambda: len(line.rows) == 4 and (after == "keep" or line.shelf("done")))
        assert shown(web, "/api/results/3/image").getpixel((0, 0)) == BLUE
        assert web("/api/results/2/image")[0] == 404


def test_overwritten_archive_image_is_reported(line):
    line.document["records"] = {"images": "all"}
    with line.served() as service:
        asked(service, order(np.zeros((8, 8, 3), np.uint8), component="c0"))
        until(lambda: line.rows)
        (kept,) = [each for each in (line.folder / "state" / "images").rglob("*") if each.is_file()]
        kept.write_bytes(bitmap(RED))
        assert "holds another image now" in Web(service).error("/api/results/1/image", status=404)["message"]
