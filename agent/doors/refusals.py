"""Refusals over both wires: the status of each reason, their words and hints."""

from __future__ import annotations

from agent.faults.errors import OrderRefused, Reason

INTERNAL = "INTERNAL"  # reason of a bug
MISTAKE = "an internal error of the agent - see its log"
OTHERS_CAME = "other callers came: of all that wait this was silent longest, and gives them its place - try again"
STATUSES = {  # of HTTP, and of gRPC
    Reason.QUEUE_FULL: (429, "RESOURCE_EXHAUSTED"),
    Reason.MESSAGE_TOO_LARGE: (413, "RESOURCE_EXHAUSTED"),
    Reason.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    Reason.NOT_FOUND: (404, "NOT_FOUND"),
    Reason.INVALID: (400, "INVALID_ARGUMENT"),
    Reason.TOO_LONG: (400, "INVALID_ARGUMENT"),
    Reason.KEY_REUSED: (409, "ALREADY_EXISTS"),
    Reason.CURSOR_UNKNOWN: (409, "FAILED_PRECONDITION"),
    Reason.NOT_NOW: (503, "FAILED_PRECONDITION"),
    Reason.STOPPING: (503, "UNAVAILABLE"),
    Reason.UNAUTHENTICATED: (401, "UNAUTHENTICATED"),
    Reason.FORBIDDEN: (403, "PERMISSION_DENIED"),
}


def invalid(field: str, message: str) -> OrderRefused:
    return OrderRefused(Reason.INVALID, f"{field}: {message}", field=field)


def retry_ms(refused: OrderRefused) -> int | None:
    """Milliseconds until a retry, at least one; None: do not retry."""
    return None if refused.retry_s is None else max(round(refused.retry_s * 1000), 1)


def copied(refused: OrderRefused) -> OrderRefused:
    """Copy to raise: the original would form a cycle with its frames."""
    return OrderRefused(refused.reason, str(refused), refused.retry_s, field=refused.field)


def text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode("utf-8")
