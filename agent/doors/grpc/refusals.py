"""Refusals over gRPC: one status code for each reason, and the reason in the trailing metadata.

Codes are ambiguous: gRPC also answers RESOURCE_EXHAUSTED to a message that is too large, where no retry helps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from agent.doors.orders import text
from experts.errors import Refusing

if TYPE_CHECKING:
    from experts.errors import OrderRefused

REASON = "coserve-reason"
PUSHBACK_MS = "grpc-retry-pushback-ms"  # respected by gRPC clients with a retry policy
INTERNAL = "INTERNAL"  # reason of a bug
MOST_CHARACTERS = 500  # gRPC's clients take more than 8 KiB of encoded text for RESOURCE_EXHAUSTED
MISTAKE = "an internal error of the agent - see its log"

STATUS = {
    Refusing.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusing.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusing.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Refusing.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Refusing.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Refusing.KEY_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Refusing.CURSOR_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Refusing.NOT_NOW: grpc.StatusCode.FAILED_PRECONDITION,
    Refusing.STOPPING: grpc.StatusCode.UNAVAILABLE,
    Refusing.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Refusing.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
}


def retry_ms(refused: OrderRefused) -> int | None:
    """Milliseconds until a retry, at least one; None: do not retry."""
    return None if refused.retry_s is None else max(round(refused.retry_s * 1000), 1)


def refuse(context: Any, refused: OrderRefused) -> None:  # noqa: ANN401  # gRPC has no types
    """Set the status of a call, sent when its method returns."""
    pushback_ms = retry_ms(refused)
    hint = () if pushback_ms is None else ((PUSHBACK_MS, str(pushback_ms)),)
    context.set_trailing_metadata(((REASON, str(refused.reason)), *hint))
    context.set_code(STATUS[refused.reason])
    details = text(str(refused))
    context.set_details(details if len(details) <= MOST_CHARACTERS else f"{details[: MOST_CHARACTERS - 3]}...")
