"""The contract of ``agent.sources.base``, asked of every source that the registry makes of a line file."""

import io
import sqlite3
from datetime import UTC, datetime

import cv2
import numpy as np
import pytest
from PIL import Image

from agent.config import read_line
from agent.sources.base import LeftOver
from agent.sources.registry import sources_of
from agent.subject import Subject
from experts.errors import OrderRefused
from tests.agent.sources.contract import ContractLine, keeps_the_contract

PATTERN = "(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)[.]png"
LINE = """
line: test
state: ./state
experts:
  cls/f: {architecture: fake, weights: f.yaml, labels: [ok, bad], input: {size: [8, 8]}}
routes:
  c0: [{expert: cls/f, pass: [ok]}]
intake: INTAKE
"""
INTAKES = {
    "folder": f"{{folders: [{{path: ./inbox, pattern: '{PATTERN}', settle_ms: 0, poll_s: 0.05}}]}}",
    "camera": "{cameras: [{name: top, url: 'file:clip.avi', loop: true, component: c0}]}",
    "journal": "{folders: []}",
}


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 200, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def line_of(folder, intake):
    (folder / "line.yaml").write_text(LINE.replace("INTAKE", intake))
    (folder / "f.yaml").write_text("{weight_bytes: 1000, label: ok}")
    return read_line(folder / "line.yaml", {})


@pytest.fixture(params=INTAKES)
def line(request, tmp_path):
    """A line with one image in one source."""
    made = ContractLine(line_of(tmp_path, INTAKES[request.param]), {7: png()})
    if request.param == "folder":
        (tmp_path / "inbox").mkdir()
        (tmp_path / "inbox" / "B1_c0_R1.png").write_bytes(png())
    elif request.param == "camera":
        clip = cv2.VideoWriter(str(tmp_path / "clip.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 20.0, (16, 16))
        clip.write(np.zeros((16, 16, 3), np.uint8))
        clip.release()
    else:
        made.left_overs = (LeftOver(7, (Subject("api/1", "api", "api/1", datetime.now(UTC), "c0"),)),)
    return made


def test_each_source_keeps_the_contract(line):
    keeps_the_contract(lambda one: sources_of(one.config, one)[0], line)


def test_what_takes_no_trigger_says_so(line):
    for source in sources_of(line.config, line):
        with pytest.raises(OrderRefused):
            source.trigger(None, None, None)


def test_a_journal_that_cannot_be_read_for_a_while_is_read_after_it(tmp_path, monkeypatch):
    line = ContractLine(line_of(tmp_path, INTAKES["journal"]), {7: png()})
    line.left_overs = (LeftOver(7, (Subject("api/1", "api", "api/1", datetime.now(UTC), "c0"),)),)
    errors = [sqlite3.OperationalError("disk I/O error"), OSError("Input/output error")]

    def journaled_image(number):
        if errors:
            raise errors.pop()
        return png()

    monkeypatch.setattr(line, "journaled_image", journaled_image)
    monkeypatch.setattr("agent.sources.left_overs.REREAD_S", 0.01)
    (source,) = sources_of(line.config, line)
    source.start()
    assert line.first().image == png()
    assert source.stop(0.0) or source.stop(30.0)
