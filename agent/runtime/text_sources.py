"""Source of a request's texts: each expert of a route has a tokeniser of its own, and so a text of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from experts.llm.serving.generation import TextRequest


@dataclass(frozen=True, slots=True)
class TextSource:
    """``text_for``: the text for an expert, by its name in the line file.

    ``AgentLoop.submit`` calls it on the caller's thread for every expert that the request may reach; an executor calls
    it again when an expert begins: so it keeps its tokens. An error ends the request with its reason.
    """

    text_for: Callable[[str], TextRequest]
