"""The desk of the API's tests, also behind HTTP; a browser."""

from tests.agent.api.conftest import desk, serve, server
from tests.agent.web.pages.conftest import browser

__all__ = ["browser", "desk", "serve", "server"]
