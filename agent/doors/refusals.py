"""Refusals over both wires: the status of each reason, their words and hints."""

from __future__ import annotations

from experts.errors import OrderRefused, Refusing

INTERNAL = "INTERNAL"  # reason of a bug
MISTAKE = "an internal error of the agent - see its log"
OTHERS_CAME = "other callers came: of all that wait this was silent longest, and gives them its place - try again"
STATUSES = {  # of HTTP, and of gRPC
    Refusing.QUEUE_FULL: (429, "RESOURCE_EXHAUSTED"),
    Refusing.MESSAGE_TOO_LARGE: (413, "RESOURCE_EXHAUSTED"),
    Refusing.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    Refusing.NOT_FOUND: (404, "NOT_FOUND"),
    Refusing.INVALID: (400, "INVALID_ARGUMENT"),
    Refusing.KEY_REUSED: (409, "ALREADY_EXISTS"),
    Refusing.CURSOR_UNKNOWN: (409, "FAILED_PRECONDITION"),
    Refusing.NOT_NOW: (503, "FAILED_PRECONDITION"),
    Refusing.STOPPING: (503, "UNAVAILABLE"),
    Refusing.UNAUTHENTICATED: (401, "UNAUTHENTICATED"),
    Refusing.FORBIDDEN: (403, "PERMISSION_DENIED"),
}


def invalid(field: str, message: str) -> OrderRefused:
    return OrderRefused(Refusing.INVALID, f"{field}: {message}", field=field)


def retry_ms(refused: OrderRefused) -> int | None:
    """Milliseconds until a retry, at least one; None: do not retry."""
    return None if refused.retry_s is None else max(round(refused.retry_s * 1000), 1)


def copied(refused: OrderRefused) -> OrderRefused:
    """Copy to raise: the original would form a cycle with its frames."""
    return OrderRefused(refused.reason, str(refused), refused.retry_s, field=refused.field)


def text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode("utf-8")
