"""Messages to systemd: the agent starts, is ready, reloads, works, stops; and backoff between short-lived starts.

Guarantees: a message is one datagram, sent without waiting; a failure is one line in the log. Only progress of the
agent feeds the watchdog, no timer. systemd restarts the agent without limit, so the count of starts survives any end.
The count is reset by a boot, HEALTHY_S of serving, a requested end, and a mistake in the line file.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agent.faults.backoff import Backoff
from agent.faults.housekeeping import Housekeeper
from experts.errors import CoServeError
from experts.filesystem import whole_text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.environment import ServiceManager

log = logging.getLogger(__name__)

EXTENSION_S = 120  # time limit of the next step of a start; a packing step writes one expert
EXTENDED_EVERY_S = 5.0
JOURNAL_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))  # syslog's levels
DEBUG_LEVEL = 7
FED_PER_LIMIT = 3  # heartbeats per limit of the watchdog
FREE_STARTS = 3  # without a pause: one after the failure, one for an image that ended the agent twice
BACKOFF = Backoff(5.0, 300.0)
HEALTHY_S = 120.0
BOOT = Path("/proc/sys/kernel/random/boot_id")


class JournalFormatter(logging.Formatter):
    """Formats for systemd's journal on stderr: a level before each line, no time."""

    def __init__(self) -> None:
        super().__init__("%(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; lines of a traceback also get the record's level."""
        level = next((number for limit, number in JOURNAL_LEVELS if record.levelno >= limit), DEBUG_LEVEL)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


class Notifier:
    """Messages to the service manager. For any thread. After ``stopping``, only failures are sent."""

    def __init__(self, manager: ServiceManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = manager.notify_socket
        self._clock = clock
        self._extended_s = float("-inf")
        self._is_logged = False
        self._is_ending = False

    def starting(self, stage: str, done: int, total: int) -> None:
        """Report a step of a start, and extend its timeout."""
        now_s = self._clock()
        if now_s - self._extended_s >= EXTENDED_EVERY_S:
            self._extended_s = now_s
            self._send(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1_000_000}\nSTATUS=starting: {stage} {done}/{total}")

    def waiting(self, reason: str, left_s: float) -> None:
        """Report a pause; call every EXTENDED_EVERY_S."""
        self._send(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1_000_000}\nSTATUS=waiting {left_s:.0f} s: {_one_line(reason)}")

    def ready(self, status: str) -> None:
        self._send_unless_ending(f"READY=1\nSTATUS={_one_line(status)}")

    def reloading(self) -> None:
        """Report a reload; ``ready`` must follow."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send_unless_ending(f"RELOADING=1\nMONOTONIC_USEC={microseconds}\nSTATUS=reloading")

    def alive(self, status: str) -> None:
        self._send_unless_ending(f"WATCHDOG=1\nSTATUS={_one_line(status)}")

    def stopping(self) -> None:
        self._is_ending = True
        self._send("STOPPING=1\nSTATUS=stopping: finishing what was taken")

    def failed(self, reason: str) -> None:
        self._send(f"STATUS={reason.splitlines()[0] if reason else 'failed'}")

    def _send_unless_ending(self, message: str) -> None:
        if not self._is_ending:
            self._send(message)

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto(message.encode(errors="replace"), address)  # file names need not be Unicode
        except OSError as error:
            if not self._is_logged:
                log.warning("service_manager_not_told socket=%s reason=%s", self._address, error.strerror)
            self._is_logged = True


def _one_line(status: str) -> str:
    """Text without line breaks: each line of a message is a separate variable."""
    return " ".join(status.splitlines())


@contextmanager
def failures_reported(notifier: Notifier) -> Iterator[None]:
    """Context: report errors as the unit's status."""
    try:
        yield
    except CoServeError as error:
        notifier.failed(str(error))
        raise


def heartbeat(notifier: Notifier, limit_s: float | None, look: Callable[[], str]) -> Housekeeper:
    """Feed the watchdog while ``look`` returns a status; stop feeding if ``look`` hangs or raises."""
    return Housekeeper({"watchdog": lambda: notifier.alive(look())}, "heartbeat", (limit_s or 30.0) / FED_PER_LIMIT)


class Starts:
    """Starts of one line's agent since it last served for HEALTHY_S. Without a writable count there is no backoff."""

    def __init__(self, state: Path, boot: Path = BOOT) -> None:
        self._file = state / "starts.json"
        self._boot = boot
        self._ready_s: float | None = None

    def count_start(self) -> float:
        """Count a start; returns the seconds to wait before it."""
        boot, starts = "", 1
        with suppress(OSError):
            boot = self._boot.read_text().strip()
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            then = json.loads(self._file.read_text())
            starts += int(then["starts"]) if then["boot"] == boot else 0
        with suppress(OSError), whole_text_file(self._file) as file:
            json.dump({"boot": boot, "starts": starts}, file)
        return BACKOFF.pause_s(starts - FREE_STARTS)

    def served(self, now_s: float) -> None:
        """Call while serving: HEALTHY_S of service reset the count."""
        self._ready_s = now_s if self._ready_s is None else self._ready_s
        if now_s - self._ready_s >= HEALTHY_S:
            self.forget()

    def forget(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
