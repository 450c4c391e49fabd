"""The contract of ``agent.sources.base``, asked of every source that the registry makes of a line file."""

import sqlite3
from datetime import UTC, datetime

import pytest

from agent.faults.errors import OrderRefused
from agent.sources.base import LeftOver
from agent.sources.registry import sources_of
from agent.subject import Subject
from tests.agent.service.fake_line import FakeLine, picture, write_clip
from tests.agent.sources.contract import ContractLine, keeps_the_contract


def with_journal(made):
    """With one image that an earlier run left in the journal."""
    line = ContractLine(made.config, {7: picture()})
    line.left_overs = (LeftOver(7, (Subject("api/1", "api", "api/1", datetime.now(UTC), "c0"),)),)
    return line


@pytest.fixture(params=["folder", "camera", "journal"])
def line(request, tmp_path):
    """A line with one image in one source."""
    made = FakeLine(tmp_path)
    if request.param == "journal":
        return with_journal(made)
    if request.param == "folder":
        made.watch(poll_s=0.05)
        made.drop("B1_c0_R1.png")
    else:
        camera = {"name": "top", "url": f"file:{write_clip(tmp_path / 'clip.avi')}", "loop": True, "component": "c0"}
        made.document["intake"] = {"cameras": [camera]}
    return ContractLine(made.config)


def test_each_source_keeps_the_contract(line):
    keeps_the_contract(lambda one: sources_of(one.config, one)[0], line)


def test_source_without_triggers_refuses_them(line):
    for source in sources_of(line.config, line):
        with pytest.raises(OrderRefused):
            source.trigger(None, None, None)


def test_journal_unreadable_for_a_while_is_read_later(tmp_path, monkeypatch):
    line = with_journal(FakeLine(tmp_path))
    errors = [sqlite3.OperationalError("disk I/O error"), OSError("Input/output error")]

    def journaled_image(number):
        if errors:
            raise errors.pop()
        return picture()

    monkeypatch.setattr(line, "journaled_image", journaled_image)
    monkeypatch.setattr("agent.sources.left_overs.REREAD_S", 0.01)
    (source,) = sources_of(line.config, line)
    source.start()
    assert line.first().image == picture()
    assert source.stop(0.0) or source.stop(30.0)
