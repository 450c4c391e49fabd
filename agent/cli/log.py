"""What a command logs, and where."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: int) -> None:
    """Logging as every command has it, with levels where the journal reads; libraries that are loud are not heard."""
    from agent.config import service_manager
    from agent.service.service_manager import JournalFormatter

    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if service_manager().takes_levels:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JournalFormatter())
    for name in ("PIL", "watchdog", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
