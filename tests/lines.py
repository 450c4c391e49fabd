"""What tests of a line are made of: subjects, results and inspections, with all that a test does not care about."""

from dataclasses import fields, replace
from datetime import UTC, datetime

from agent.doors.desk import ImageOrder
from agent.records.boards import Inspection
from agent.records.verdict import Result
from agent.subject import CALLERS, Subject
from experts.expert import Verdict

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
OF_SUBJECT = frozenset(field.name for field in fields(Subject))


def subject(key="k", **about):
    return Subject(**{"key": key, "source": "", "image": "i.png", "arrived_at": NOON, "component": "r"} | about)


def result(key="k", verdict=Verdict.OK, **said):
    """A stored result; ``said``: fields of the result, and of its subject."""
    usual = {"line": "demo", "finished_at": said.get("arrived_at", NOON), "seconds": 0.1, "config_sha256": "ab"}
    about, told = _divided(said)
    return Result(subject=subject(key, **about), verdict=verdict, **usual | told)


def changed(made, **said):
    """The same result with other fields, of its own or of its subject."""
    about, told = _divided(said)
    return replace(made, subject=replace(made.subject, **about), **told)


def order(image, *, is_kept=True, wants_maps=False, key="", **about):
    """What a caller asks; ``about``: fields of the subject."""
    return ImageOrder(Subject(key, CALLERS, key, NOON, **about), image, is_kept, wants_maps)


def inspection(board, board_type, component, ref, verdict, at, image_sha256=None):
    place = {"board": board, "board_type": board_type, "component": component, "ref": ref}
    return Inspection(Subject("", "", "", at, **place), verdict, at, image_sha256=image_sha256)


def _divided(said):
    about = {name: value for name, value in said.items() if name in OF_SUBJECT}
    return about, {name: value for name, value in said.items() if name not in OF_SUBJECT}
