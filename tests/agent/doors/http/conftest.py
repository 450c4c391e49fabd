"""A browser, for all tests behind HTTP."""

from tests.agent.doors.http.pages.conftest import browser

__all__ = ["browser"]
