"""Callers and roles: what a caller of any wire may do.

Guarantees: roles are ordered, and a role includes those below it. Only a token or the owner's unix socket gives
OPERATE and ADMIN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from experts.errors import OrderRefused, Refusing


class Role(IntEnum):
    """READ: read, and ask without storing. INSPECT: store inspections. OPERATE: review, rework, trigger. ADMIN: reload,
    promote, load and unload."""

    READ = 1
    INSPECT = 2
    OPERATE = 3
    ADMIN = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: of the token in the line file, ``owner`` at the owner's unix socket, else ``anonymous``."""

    name: str
    role: Role

    def check(self, least: Role) -> None:
        """Raises OrderRefused for a caller with a lower role."""
        if self.role >= least:
            return
        wanted = f"this needs the role {least.name.lower()}"
        if self.name == ANONYMOUS:
            raise OrderRefused(Refusing.UNAUTHENTICATED, f"{wanted} - send a token of `api.tokens` that has it")
        raise OrderRefused(Refusing.FORBIDDEN, f"{wanted}, and {self.name!r} has {self.role.name.lower()}")


ANONYMOUS, OWNER = "anonymous", "owner"


class Audit(Protocol):
    def __call__(self, caller: Caller, action: str, subject: str, outcome: str) -> None:
        """Record a call that changes something, once it has ended. ``outcome``: done, or why it was refused."""
