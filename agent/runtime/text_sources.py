"""Source of a request's texts: the caller's request to each expert that its route may reach.

An expert reads tokens of its own tokeniser, so a request that a router sends on is another text to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from experts.llm.serving.generation import TextRequest


@dataclass(frozen=True, slots=True)
class TextSource:
    """One request's text. ``text_for(expert)``: what it wants of this one, by its name in the line file.

    It is called by ``AgentLoop.submit``, on the caller's thread, for every expert that the request may reach, and once
    more on an executor's thread when an expert begins with it; so it keeps what takes long, such as tokens. What it
    raises for one that is reached is the reason that the request ends with.
    """

    text_for: Callable[[str], TextRequest]
