"""Process of ``coserve serve``: serves one line until a signal or a crash of its agent, and reports to systemd.

Guarantees: a signal ends the process at any time, also during a reload, on any thread. A fault that ends a thread ends
the process as AgentCrashed. One agent serves a line. Under systemd, short-lived starts are spaced by growing pauses, a
missing device or a held state by a constant one; the unit's status gives the reason.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agent.doors.access import CALLING, SIGNAL, audited, ended
from agent.environment import service_manager
from agent.faults.errors import AgentCrashed, AlreadyRunning, DeviceMissing, OrderRefused, StateUnusable
from agent.records.database import state_held
from agent.runtime.machine.garbage import keep_what_is_here
from agent.runtime.machine.libraries import release_loaded_pages
from agent.service.line_service import LineService
from agent.service.service_manager import EXTENDED_EVERY_S, Notifier, Starts, heartbeat
from experts.daemon_threads import DaemonThreads
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.config import LineConfig

log = logging.getLogger(__name__)

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOADING_SIGNAL = signal.SIGHUP
PASSING = (DeviceMissing, AlreadyRunning, StateUnusable)
PASSING_PAUSE_S = 20.0  # a process that found no device never finds it: a new one looks again
MANY_STARTS = "earlier starts ended soon, and the log says why"
NOTHING_DONE = MappingProxyType({"requests": 0, "threads_left_behind": False})
NOTIFIED = 0  # written by ``notify``: no signal has this number


@dataclass(frozen=True, slots=True)
class _End:
    """Pipe that carries the request to end: a signal's number, or NOTIFIED."""

    reader: int
    writer: int

    def notify(self) -> None:
        """Request the end. For any thread, at any moment."""
        with suppress(OSError):  # full of equal messages, or closed
            os.write(self.writer, bytes([NOTIFIED]))

    def wait(self, reload: Callable[[], object]) -> None:
        """Wait for ``notify`` or an ending signal, even an earlier one; ``reload`` must not block."""
        while (number := os.read(self.reader, 1)[0]) not in (NOTIFIED, *ENDING_SIGNALS):
            if number == RELOADING_SIGNAL:
                reload()


@contextmanager
def _threads_watched(notify: Callable[[], None]) -> Iterator[list[AgentCrashed]]:
    """Context: a fault that ends a thread of the agent ends the agent. Libraries' threads are named by numbers."""
    crashes, before = list[AgentCrashed](), threading.excepthook

    def died(what: threading.ExceptHookArgs) -> None:
        name = "" if what.thread is None else what.thread.name
        if name.startswith("Thread-") or not isinstance(what.exc_value, Exception):
            before(what)
            return
        log.critical("thread_died thread=%s: the agent ends", name, exc_info=what.exc_value)
        crash = AgentCrashed(what.exc_value)
        crash.__cause__ = what.exc_value
        crashes.append(crash)
        notify()

    threading.excepthook = died
    try:
        yield crashes
    finally:
        threading.excepthook = before


@contextmanager
def _awaited_end() -> Iterator[_End]:
    """Context in which every signal that Python handles writes to a pipe.

    A handler that sets an Event or a queue would not do: handlers run on the main thread, between two instructions. A
    signal received by another thread, or just before the main thread blocks on a lock, would leave it blocked.
    """
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield _End(reader, writer)
        finally:
            signal.set_wakeup_fd(before)
    finally:
        os.close(reader)
        os.close(writer)


def serve_line(config: LineConfig, progress: Callable[[str, int, int], None]) -> Mapping[str, Any]:
    """Serve until SIGTERM or SIGINT; returns counts of the work. SIGHUP reloads the line file.

    Raises ConfigError before the start, AlreadyRunning, StateUnusable, AgentCrashed."""
    manager = service_manager()
    notifier, is_started_again = Notifier(manager), manager.notify_socket is not None

    def report(stage: str, done: int, total: int) -> None:
        notifier.starting(stage, done, total)
        progress(stage, done, total)

    def serve(end: _End) -> Mapping[str, Any]:
        with state_held(config.state), _threads_watched(end.notify) as crashes:
            starts = Starts(config.state)
            if is_started_again and not _waited(end, notifier, starts.count_start(), MANY_STARTS):
                starts.forget()
                return dict(NOTHING_DONE)
            try:
                service = LineService(config, report, on_crash=end.notify)
            except ConfigError:
                starts.forget()
                raise
            _take_signals()
            keep_what_is_here()  # before anything waits for it
            service.start()

            def look() -> str:
                starts.served(time.monotonic())
                return service.status_line()

            beating = heartbeat(notifier, manager.watchdog_s, look)
            notifier.ready(service.status_line())
            beating.start()
            release_loaded_pages()
            reloads = DaemonThreads(1, "reload")  # may wait for a disk, or pack for minutes
            end.wait(lambda: reloads.submit(_reload, service, notifier))
            log.info("stopping line=%s", config.line)
            notifier.stopping()
            beating.stop(0.0)
            closing = service.stop()
            if crashes:
                raise crashes[0]
            starts.forget()
            log.info("stopped line=%s %s", config.line, " ".join(f"{key}={value}" for key, value in closing.items()))
            return closing

    with _awaited_end() as end:
        try:
            return serve(end)
        except PASSING as error:
            if is_started_again and not _waited(end, notifier, PASSING_PAUSE_S, str(error)):
                return dict(NOTHING_DONE)
            raise


def _take_signals() -> dict[signal.Signals, Any]:
    """Leave signals to the pipe; returns the earlier handlers."""
    numbers = (*ENDING_SIGNALS, RELOADING_SIGNAL)
    return {number: signal.signal(number, lambda *_: None) for number in numbers}  # Python writes to the pipe first


def _waited(end: _End, notifier: Notifier, seconds: float, reason: str) -> bool:
    """Pause, and report the reason; False after a signal to end. Restores the earlier signal handlers."""
    if seconds:
        log.error("waiting seconds=%.0f reason=%s", seconds, reason)
    until_s, before = time.monotonic() + seconds, _take_signals()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            notifier.waiting(reason, left_s)
            has_signal, *_ = select.select([end.reader], [], [], min(left_s, EXTENDED_EVERY_S))
            if has_signal and os.read(end.reader, 1)[0] != RELOADING_SIGNAL:
                return False
        return True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reload(service: LineService, notifier: Notifier) -> None:
    """Handle SIGHUP: a refused line file leaves the old configuration in place."""
    notifier.reloading()
    try:
        CALLING.set(SIGNAL)
        with audited(service.audit, "reload", str, lambda: ended(done)):
            done = service.desk.reload()
    except OrderRefused as refused:
        log.error("reload_refused reason=%s", refused)
    else:
        for problem in done.problems:
            log.error("reload_problem %s", problem)
        log.info(
            "reloaded applied=%s added=%s replaced=%s removed=%s needs_restart=%s",
            done.is_applied, ",".join(done.added), ",".join(done.replaced), ",".join(done.removed),
            ",".join(done.needs_restart),
        )  # fmt: skip
    notifier.ready(service.status_line())
