"""The extra ``coserve[cluster]``: is it installed? Imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

MODULES = ("ray", "pyarrow")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # tries to reach the cluster, of 40 s; Ray's 20 would take a quarter of an hour
}


def why_absent() -> str | None:
    """Advice what to install; None if the extra is there."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if not missing:
        return None
    return f"a cluster needs {' and '.join(missing)}: install the extra with `pip install 'coserve[cluster]'`"
