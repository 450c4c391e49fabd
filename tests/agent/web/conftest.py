"""The desk of the API's tests, also behind HTTP."""

from tests.agent.api.conftest import desk, serve, server

__all__ = ["desk", "serve", "server"]
