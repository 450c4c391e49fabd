"""The software that something was measured with."""

from __future__ import annotations

import platform
from importlib.metadata import version


def software() -> str:
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
