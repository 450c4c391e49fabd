"""Trust in a served line's experts: which of them are proven, and which verdicts may rest on the others.

Guarantees: a verdict is judged by the proofs of the version that answered, also while the line changes. A proof that is
written or made void beside the agent counts after the next ``step``.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from agent.core.request import Doubts
from agent.deployment.packed_copies import doubts_of, proven_copies
from agent.line_file.proofs import FILE_NAME, text_of_lacks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.request import Outcome
    from agent.deployment.build import Agent
    from agent.line_file.proofs import Lack

log = logging.getLogger(__name__)


class Trust:
    """``lacks``: why experts are unproven, ``compared_at``: when they were compared with known answers as they are now,
    both by the line's names. For any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lacking: Mapping[str, Lack] = {}  # by the Engine's names, also of experts that were replaced
        self._doubts = Doubts()
        self._turning = threading.Lock()
        self.turn_to(agent)
        if self.lacks:
            again = f"coserve experts verify {agent.config.document.file}"
            log.warning(
                "experts_unproven count=%d %s - prove them: %s", len(self.lacks), text_of_lacks(self.lacks), again
            )

    def step(self) -> None:
        """Read the proofs anew if they were written."""
        if self._stamp(self._agent) != self._read_at:
            self.turn_to(self._agent)

    def turn_to(self, agent: Agent) -> None:
        """Call before the agent serves another line."""
        with self._turning:
            self._agent, self._read_at = agent, self._stamp(agent)
            self.lacks, self.compared_at = proven_copies(agent.config, agent.served)
            served = {agent.expert(name): name for name in agent.config.catalog.experts}
            replaced = agent.setup.graph.experts - served.keys()
            lacking = {now: self.lacks[name] for now, name in served.items() if name in self.lacks}
            lacking |= {name: lack for name, lack in self._lacking.items() if name in replaced}
            self._doubts, self._lacking = doubts_of(agent.config, lacking), lacking

    def judged(self, outcome: Outcome) -> tuple[Outcome, tuple[bool, ...]]:
        """The outcome, UNKNOWN where it may not rest on its experts, and which of its steps are of unproven ones."""
        lacking = self._lacking
        return self._doubts.applied(outcome), tuple(step.expert in lacking for step in outcome.steps)

    @staticmethod
    def _stamp(agent: Agent) -> object:
        try:
            status = (agent.config.state / FILE_NAME).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size
