"""Wires to a line: gRPC and HTTP, with one desk, one set of tokens and one audit behind both.

Guarantees: an address in use is tried again until it opens, and is an alarm meanwhile. A line without addresses of a
wire imports nothing of it, which saves time and memory.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from agent.doors.credentials import Credentials
from agent.faults.housekeeping import Housekeeper
from agent.service.line_metrics import LineMetrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.doors.access import Caller
    from agent.doors.grpc.server import ApiServer
    from agent.doors.http.server import WebServer
    from agent.doors.statistics import CallStatistics
    from agent.line_file.api import ApiSection
    from agent.records.station.audit import AuditTrail
    from agent.service.desk.line_desk import LineDesk
    from agent.service.desk.line_state import LineParts

log = logging.getLogger(__name__)


class LineWires:
    """``api``, ``web``: None without addresses. Call ``start``, ``stop_calls`` and ``stop`` once."""

    def __init__(self, parts: LineParts, desk: LineDesk, trail: AuditTrail) -> None:
        self._line = parts
        self._desk = desk
        self._trail = trail
        self._section = section = parts.inspector.agent.config.api
        self._credentials = Credentials(section)
        self.api = self._api() if section.grpc else None
        self.web = self._web() if section.http else None
        self._doorkeeper = Housekeeper({"api.http": self._open_web, "api.grpc": self._open_api}, "doorkeeper")

    def start(self) -> None:
        self._doorkeeper.step()
        if self._doorkeeper.failing:
            self._doorkeeper.start()

    @property
    def failing(self) -> Mapping[str, str]:
        """Wire -> why it is not open."""
        return self._doorkeeper.failing

    def reload(self, section: ApiSection) -> None:
        """Serve its tokens and certificates. Raises ConfigError, and then changes nothing."""
        self._credentials.reload(section)

    def audit(self, caller: Caller, action: str, subject: str, outcome: str) -> None:
        """Implements ``agent.doors.access.Audit``."""
        sha256 = self._line.inspector.agent.config.catalog.sha256
        self._trail.record(caller.name, caller.role.name.lower(), action, subject, outcome, sha256)

    def stop_calls(self, timeout_s: float) -> None:
        """Refuse new callers over gRPC; waiting callers get their answers within the timeout."""
        self._doorkeeper.stop(timeout_s)
        if self.api is not None and self.api.addresses and not self.api.stop(timeout_s):
            log.warning("api_not_drained orders=%d they are judged all the same", self.api.orders_under_way)

    def stop(self) -> None:
        """Close HTTP, which reports until then that no work is taken."""
        if self.web is not None:
            self.web.stop()

    def _open_web(self) -> None:
        """Raises AddressUnusable, as ``_open_api`` does; a later call may succeed."""
        if self.web is not None and not self.web.addresses:
            self.web.start()

    def _open_api(self) -> None:
        if self.api is not None and not self.api.addresses:
            self.api = api = self._api()  # a server that failed to start cannot start again
            api.start()

    def _api(self) -> ApiServer:
        from agent.doors.grpc.server import ApiServer

        return ApiServer(self._section, self._desk, self._credentials, self.audit, self._call_statistics)

    @cached_property
    def _call_statistics(self) -> CallStatistics:
        """Counts of gRPC and HTTP together."""
        from agent.doors.statistics import CallStatistics

        return CallStatistics()

    def _web(self) -> WebServer:
        from agent.doors.http.door import WebDoor
        from agent.doors.http.inference.endpoint import InferenceEndpoint
        from agent.doors.http.metrics.monitoring import Monitoring
        from agent.doors.http.pages.files import pages_section
        from agent.doors.http.server import WebServer
        from agent.doors.http.station import StationRoutes
        from agent.doors.http.texts import described
        from agent.doors.http.texts.endpoint import TextEndpoint
        from agent.doors.orders import Orders
        from agent.service.station import served
        from agent.service.station.line_station import LineStation

        limits, station = self._section.limits, LineStation(self._line, self._desk)
        sections = [
            TextEndpoint(Orders(self._desk)).section(),
            InferenceEndpoint(Orders(self._desk), limits, self._call_statistics).section(),
            StationRoutes(station, (*served.OPERATIONS, *described.OPERATIONS)).section(),
            Monitoring(LineMetrics(self._line)).section(),
            pages_section(self._section.frame_ancestors),  # the last one answers the rest
        ]
        door = WebDoor(sections, self._credentials.tokens, self.audit, self._section)
        return WebServer(self._section, door, self._credentials.context())
