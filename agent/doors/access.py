"""Callers, roles and tokens: who calls by any wire, and what a caller may do.

Guarantees: roles are ordered, and a role includes those below it. Only a token or the owner's unix socket gives
OPERATE and ADMIN. Tokens are compared in constant time. A call that changes something is audited when it ends. A change
that outlives its call is audited again when it ends itself.
"""

from __future__ import annotations

import hmac
import logging
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agent.environment import read_secret
from agent.faults.errors import OrderRefused, Reason, SecretMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.line_file.api import ApiSection

log = logging.getLogger(__name__)

Found = TypeVar("Found")

BEARER = "bearer "
SESSION = b"coserve session"


class Role(IntEnum):
    """READ: read, and ask without storing. INSPECT: store inspections. OPERATE: review, rework, trigger. ADMIN: reload,
    promote, load and unload."""

    READ = 1
    INSPECT = 2
    OPERATE = 3
    ADMIN = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: the token's in the line file, ``owner`` at the owner's unix socket, else ``anonymous``."""

    name: str
    role: Role

    def check(self, least: Role) -> None:
        """Raises OrderRefused for a caller with a lower role."""
        if self.role >= least:
            return
        wanted = f"this needs the role {least.name.lower()}"
        if self.name == ANONYMOUS:
            raise OrderRefused(Reason.UNAUTHENTICATED, f"{wanted} - send a token of `api.tokens` that has it")
        raise OrderRefused(Reason.FORBIDDEN, f"{wanted}, and {self.name!r} has {self.role.name.lower()}")


ANONYMOUS, OWNER = "anonymous", "owner"
SIGNAL = Caller("signal", Role.ADMIN)  # sender of a signal to the agent
NOBODY = Caller(ANONYMOUS, Role.INSPECT)  # a call without a token, where none is required
STRANGER = Caller(ANONYMOUS, Role.READ)  # code outside of a call
CALLING: ContextVar[Caller] = ContextVar("calling", default=STRANGER)  # of the call under way
MAKING: ContextVar[list[Future[Any]]] = ContextVar("making")  # changes of the audited call under way


class Where(Enum):
    """Side of a caller. OWNER: a unix socket, as the agent's user or root. GROUP: a unix socket that its group may
    open. LOOPBACK, FAR: addresses of this machine, and addresses that other machines reach."""

    OWNER = auto()
    GROUP = auto()
    LOOPBACK = auto()
    FAR = auto()


@dataclass(frozen=True, slots=True)
class _Token:
    caller: Caller
    secret: bytes

    @property
    def session(self) -> bytes:
        return f"{self.caller.name}.{hmac.new(self.secret, SESSION, sha256).hexdigest()}".encode()


class Tokens:
    """Tokens of the line file. ``are_required``: each caller at HOST:PORT must send one."""

    def __init__(self, api: ApiSection) -> None:
        """Raises SecretMissing."""
        self.are_required = api.token is not None
        self._all = [
            _Token(Caller(name, Role[section.role.upper()]), read_secret(section).encode())
            for name, section in api.tokens.items()
        ]
        if api.token is not None:
            self._all.append(_Token(Caller("token", Role.ADMIN), read_secret(api.token).encode()))
        names: dict[bytes, str] = {}
        for token in self._all:  # else the audit would name another caller, with another role
            if names.setdefault(token.secret, token.caller.name) != token.caller.name:
                reason = f"{names[token.secret]!r} has the same token, and each needs one of its own"
                raise SecretMissing(f"the token of {token.caller.name!r}", reason)

    def become(self, other: Tokens) -> None:
        """Take the tokens of a reloaded line file. Whether a token is required stays as at the start."""
        self._all = other._all

    def caller(self, authorization: str, where: Where, *, is_required: bool = False) -> Caller:
        """Caller that sent this `authorization`, or none (""). Raises OrderRefused for an unknown or missing token."""
        if where is Where.OWNER:
            return Caller(OWNER, Role.ADMIN)
        shown = authorization[len(BEARER) :] if authorization[: len(BEARER)].lower() == BEARER else ""
        found = self.of_secret(shown)
        if found is not None:
            return found
        if where is Where.GROUP:
            return NOBODY
        if self.are_required or is_required or (shown and self._all):
            reason = "this address wants a token of the line file - send authorization: Bearer TOKEN"
            raise OrderRefused(Reason.UNAUTHENTICATED, reason)
        return NOBODY

    def of_secret(self, shown: str) -> Caller | None:
        return self._found(shown.encode("utf-8", "surrogatepass"), lambda token: token.secret)

    def of_session(self, cookie: str) -> Caller | None:
        return self._found(cookie.encode("utf-8", "surrogatepass"), lambda token: token.session)

    def session(self, caller: Caller) -> str:
        """Cookie of a session, which ends with the caller's token."""
        return next(token.session for token in self._all if token.caller == caller).decode()

    def _found(self, shown: bytes, kept: Callable[[_Token], bytes]) -> Caller | None:
        """The caller; each token is compared, so that the time tells nothing."""
        matching = [token.caller for token in self._all if hmac.compare_digest(shown, kept(token))]
        return matching[0] if matching else None


class Audit(Protocol):
    def __call__(self, caller: Caller, action: str, subject: str, outcome: str) -> None:
        """Record a call that changes something, once it has ended. ``outcome``: done, or why it was refused."""


def logged(caller: Caller, action: str, subject: str, outcome: str) -> None:
    """Implements ``Audit``, in the log alone."""
    log.info("audit who=%s action=%s subject=%s outcome=%s", caller.name, action, subject, outcome)


def making(change: Future[Found]) -> Future[Found]:
    """The change on another thread, which belongs to the audited call under way, if there is one."""
    MAKING.get([]).append(change)
    return change


@contextmanager
def audited(
    audit: Audit, action: str, subject: Callable[[], str], done: Callable[[], str] = lambda: "done"
) -> Iterator[None]:
    """Context of a call that changes something: its end is audited. ``done``: outcome of a call that was answered."""
    outcome, changes = "cut off", list[Future[Any]]()
    before = MAKING.set(changes)
    try:
        yield
        outcome = done()
    except Exception as error:
        outcome = _failure(error)
        raise
    finally:
        MAKING.reset(before)
        caller, what = CALLING.get(), subject()
        audit(caller, action, what, outcome)
        for change in changes:
            if not change.done():  # else the call had its outcome, or it was cancelled before it began
                change.add_done_callback(lambda change: audit(caller, action, what, _end_of(change)))


def ended(answer: Any) -> str:  # noqa: ANN401  # of any call
    """Outcome of an answered call: a reload may have changed nothing, also one behind a promotion."""
    reload = getattr(answer, "reload", answer)
    return "done" if getattr(reload, "is_applied", True) else f"not applied: {'; '.join(reload.problems)}"


def _end_of(change: Future[Any]) -> str:
    error = change.exception()
    return ended(change.result()) if error is None else _failure(error)


def _failure(error: BaseException) -> str:
    return f"{error.reason}: {error}" if isinstance(error, OrderRefused) else f"failed: {type(error).__name__}"
