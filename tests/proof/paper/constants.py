"""Every constant of a device: what tests of devices look through."""

from __future__ import annotations

from pydantic import BaseModel

from proof.paper.devices import Constant


def constants(section, path=""):
    """Each with its key."""
    for name in type(section).model_fields:
        yield from _constants_in(getattr(section, name), f"{path}.{name}" if path else name)


def _constants_in(value, path):
    if isinstance(value, Constant):
        yield path, value
    elif isinstance(value, BaseModel):
        yield from constants(value, path)
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _constants_in(below, f"{path}.{key}")
