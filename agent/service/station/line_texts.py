"""The line file of a running line: its text, and a check of another one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason
from agent.lines.line_check import checked_line
from agent.service.station import views
from experts.document import parse_document
from experts.errors import ConfigError

if TYPE_CHECKING:
    from agent.config import LineConfig

PROBLEMS = 200  # shown at most


def line_document(config: LineConfig) -> views.LineDocument:
    """Raises OrderRefused for a file that cannot be read."""
    file = config.document.file
    try:
        content = file.read_bytes()
    except OSError as error:
        raise OrderRefused(Reason.NOT_NOW, f"{file}: cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(content).hexdigest()
    text = content.decode("utf-8", "replace")
    return views.LineDocument(str(file), text, digest, content == config.document.content)


def check_text(config: LineConfig, text: str) -> views.CheckedDocument:
    """Mistakes of a text in place of the line file, which stays as it is."""
    try:
        checked_line(parse_document(config.document.file, text.encode()))
    except ConfigError as error:
        return views.CheckedDocument(tuple(_problem(each) for each in error.problems[:PROBLEMS]))
    return views.CheckedDocument(())


def _problem(error: ConfigError) -> views.LineProblem:
    place = error.place
    if place is None:
        return views.LineProblem(None, None, None, error.message)
    return views.LineProblem(place.line, place.column, place.key, error.message)
