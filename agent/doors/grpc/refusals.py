"""Refusals over gRPC: one status code for each reason, and the reason in the trailing metadata.

Codes are ambiguous: gRPC also answers RESOURCE_EXHAUSTED to a message that is too large, where no retry helps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from agent.doors.refusals import STATUSES, retry_ms, text

if TYPE_CHECKING:
    from agent.faults.errors import OrderRefused

REASON = "coserve-reason"
PUSHBACK_MS = "grpc-retry-pushback-ms"  # respected by gRPC clients with a retry policy
MOST_CHARACTERS = 500  # gRPC's clients take more than 8 KiB of encoded text for RESOURCE_EXHAUSTED

STATUS = {reason: grpc.StatusCode[name] for reason, (_, name) in STATUSES.items()}


def refuse(context: Any, refused: OrderRefused) -> None:  # noqa: ANN401  # gRPC has no types
    """Set the status of a call, sent when its method returns."""
    pushback_ms = retry_ms(refused)
    hint = () if pushback_ms is None else ((PUSHBACK_MS, str(pushback_ms)),)
    context.set_trailing_metadata(((REASON, str(refused.reason)), *hint))
    context.set_code(STATUS[refused.reason])
    details = text(str(refused))
    context.set_details(details if len(details) <= MOST_CHARACTERS else f"{details[: MOST_CHARACTERS - 3]}...")
