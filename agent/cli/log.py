"""Logging of commands."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: int) -> None:
    """Log to stderr, with syslog levels under systemd; verbose libraries from WARNING on."""
    from agent.config import service_manager
    from agent.service.service_manager import JournalFormatter

    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if service_manager().takes_levels:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JournalFormatter())
    for name in ("PIL", "watchdog", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
