"""Interceptor of every gRPC call: who calls, and whether the method is for callers of that role.

Guarantees: a call that is refused is refused before its messages are received. Methods know their caller
(``agent.doors.access.CALLING``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from agent.doors.access import CALLING
from agent.doors.grpc.door import ACTIONS
from agent.doors.grpc.refusals import refuse
from agent.faults.errors import OrderRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agent.doors.access import Tokens, Where

Call = Any  # gRPC has no types


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Access check of the calls at one address."""

    def __init__(self, tokens: Tokens, where: Where) -> None:
        self._tokens = tokens
        self._where = where

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Call]], details: Call) -> Call:
        """The requested method, or one that refuses."""
        shown = dict(details.invocation_metadata).get("authorization", "")
        try:
            caller = self._tokens.caller(shown, self._where)
            if action := ACTIONS.get(details.method.rpartition("/")[2]):
                caller.check(action.least)
        except OrderRefused as refused:
            return grpc.stream_unary_rpc_method_handler(_refusing(refused.with_traceback(None)))
        CALLING.set(caller)
        return await continuation(details)


def _refusing(refused: OrderRefused) -> Callable[[Call, Call], Awaitable[None]]:
    async def method(requests: Call, context: Call) -> None:
        refuse(context, refused)

    return method
