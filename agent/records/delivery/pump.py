"""Pump: delivers the messages of the outbox to one receiver, in order, until each is acknowledged.

Guarantees: a message leaves the outbox after the receiver acknowledged it, or refused it finally, which is logged and
counted. Messages keep the order of storing. At most ``per_s`` messages are sent per second, also from a long backlog.
An unreachable receiver is retried with backoff, and logged once for each reason. A message may be delivered twice with
the same id: when the process ends between the acknowledgement and the commit that deletes the message.

One message stops no other for ever. M1 ends STRIKES accepted connections, and becomes a suspect: from then on one other
message goes ahead of it. If M2 is acknowledged, and M1 ends the same connection, M1 counts as refused. If M2 ends its
connection, too, M3 is tried. While the receiver takes none, no message is refused.

A coroutine on a separate event loop; the loop's time is its only clock.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.faults.backoff import Backoff
from agent.faults.errors import MessageRefused, ReceiverUnavailable
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.records.delivery.receiver import Receiver, ReceiverConnection
    from agent.records.outbox import Message, OutboxReader

    Settle = Callable[[Sequence[str], Callable[[], None]], None]

log = logging.getLogger(__name__)

READ_MESSAGES = 100
BACKOFF = Backoff(0.5, 60.0)
LONGEST_ASKED_S = 3600.0  # longest Retry-After that is respected
SETTLE_MESSAGES = 50  # acknowledged messages that are deleted together
SETTLE_S = 0.25  # an acknowledged message waits that long for others
SETTLING_MAXIMUM = 1000  # acknowledged messages whose commit is under way: bounds repeats while a disk hangs
LOOK_S = 5.0  # between two looks without a wake-up
STRIKES = 3  # accepted connections that a message ends before another one goes ahead of it
SUSPECTS_MAXIMUM = READ_MESSAGES // 2  # beyond it the receiver takes nothing, and messages go in order again
REFUSAL_SHOWN_S = 3600.0


class Pump:
    """``settle`` deletes messages from the outbox, and calls back from any thread after the commit.
    ``delivered`` and ``refused``: since the start. ``alarm``: reason why delivery fails now; None: no alarm.
    ``refusal``: the last message that was refused within REFUSAL_SHOWN_S, and why."""

    def __init__(self, receiver: Receiver, outbox: OutboxReader, settle: Settle, per_s: float) -> None:
        self._receiver = receiver
        self._outbox = outbox
        self._settle = settle
        self._interval_s = 1.0 / per_s
        self._next_turn_s = 0.0
        self._failures = 0  # in a row
        self._acknowledged: list[str] = []  # not yet passed to ``settle``
        self._acknowledged_since_s = 0.0
        self._settling: set[str] = set()  # passed to ``settle``, not yet deleted
        self.delivered = 0
        self.refused = 0
        self.alarm: str | None = None
        self._alarm_until_s = 0.0
        self.refusal: str | None = None
        self._refusal_until_s = 0.0
        self._strikes: dict[str, int] = {}  # by message: accepted connections that ended on it
        self._has_delivered = False  # on this connection
        self._given_way: int | None = None  # last value seen
        self._is_giving_way = False
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Look for new messages. For any thread."""
        self._soon(self._woken.set)

    async def run(self) -> None:
        """Deliver until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                wait_s = await self._serve()
                self._look_at_limit()
                await asyncio.sleep(wait_s)
        finally:
            self._hand_over()

    async def _serve(self) -> float:
        """Connect and deliver until an error; returns the pause before the next try."""
        began_s: float | None = None
        try:
            async with self._receiver.connected() as connection:
                began_s = self._now_s
                await self._drain(connection)
        except ReceiverUnavailable as error:
            self._raise_alarm(error.reason, error.shown_s)
            asked_s = error.retry_s
        except ConfigError as error:  # a missing password
            self._raise_alarm(str(error))
            asked_s = None
        except Exception as error:  # boundary of the pump's thread
            if self.alarm is None:
                log.exception("outbox_failed receiver=%s", self._receiver.name)
            self._raise_alarm(f"{type(error).__name__}: {error}")
            asked_s = None
        if began_s is not None and self._now_s - began_s > BACKOFF.longest_s:
            self._failures = 0
        self._hand_over()
        self._failures += 1
        return max(BACKOFF.pause_s(self._failures), min(asked_s or 0.0, LONGEST_ASKED_S))

    async def _drain(self, connection: ReceiverConnection) -> None:
        self._has_delivered = False
        while True:
            messages = self._next()
            if not messages:
                await self._rest(connection)
            for message in messages:
                await self._take_turn()
                await self._tell(connection, message)

    async def _take_turn(self) -> None:
        """Wait for the next turn at ``per_s``; unused turns are lost."""
        at_s = max(self._next_turn_s, self._now_s)
        self._next_turn_s, wait_s = at_s + self._interval_s, at_s - self._now_s
        if wait_s > SETTLE_S:
            self._hand_over()
        await asyncio.sleep(wait_s)

    def _next(self) -> list[Message]:
        """Messages to deliver next; none while SETTLING_MAXIMUM deliveries are uncommitted."""
        self._look_at_limit()
        delivered = self._settling.union(self._acknowledged)
        if len(delivered) >= SETTLING_MAXIMUM:
            return []
        waiting = self._outbox.waiting(self._receiver.name, len(delivered) + READ_MESSAGES)
        return self._in_order([message for message in waiting if message.id not in delivered])

    def _in_order(self, waiting: list[Message]) -> list[Message]:
        """Messages in the order of storing; with suspects, first the other message with the fewest strikes."""
        suspects = [message for message in waiting if self._strikes.get(message.id, 0) >= STRIKES]
        others = [message for message in waiting if message not in suspects]
        if suspects and others:
            return [min(others, key=lambda message: self._strikes.get(message.id, 0)), *suspects]
        return waiting

    async def _tell(self, connection: ReceiverConnection, message: Message) -> None:
        try:
            await connection.deliver(message)
        except MessageRefused as error:
            self._refuse(message, error.reason)
        except ReceiverUnavailable as error:
            if error.by_message and self._is_cause(message):
                self._refuse(message, f"{error.reason}; it ended several connections, on which other messages went")
                self._settle_soon(message)
            raise
        else:
            self.delivered += 1
            self._has_delivered = True
        self._failures = 0
        self._end_alarm()
        self._settle_soon(message)

    def _is_cause(self, message: Message) -> bool:
        """Count a connection that ended on this message; True if a suspect ended one that had taken another message."""
        strikes = self._strikes[message.id] = self._strikes.get(message.id, 0) + 1
        if len(self._strikes) > SUSPECTS_MAXIMUM:
            self._strikes.clear()
        return strikes > STRIKES and self._has_delivered

    def _refuse(self, message: Message, reason: str) -> None:
        self.refused += 1
        self.refusal = f"{self.refused} since the start, the last one {message.id} (board {message.board}): {reason}"
        self._refusal_until_s = self._now_s + REFUSAL_SHOWN_S
        log.error(
            "message_refused receiver=%s id=%s board=%s reason=%s: it is dropped; its verdict stays in the results",
            self._receiver.name, message.id, message.board, reason,
        )  # fmt: skip

    def _settle_soon(self, message: Message) -> None:
        self._strikes.pop(message.id, None)
        if not self._acknowledged:
            self._acknowledged_since_s = self._now_s
        self._acknowledged.append(message.id)
        if len(self._acknowledged) >= SETTLE_MESSAGES or self._now_s - self._acknowledged_since_s >= SETTLE_S:
            self._hand_over()

    async def _rest(self, connection: ReceiverConnection) -> None:
        """Wait for a wake-up, LOOK_S, or the loss of the connection."""
        self._hand_over()
        waits = asyncio.ensure_future(self._woken.wait()), asyncio.ensure_future(connection.lost())
        try:
            await asyncio.wait(waits, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                waits[1].result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._end_alarm()  # connected for that long, without messages
        self._woken.clear()

    def _hand_over(self) -> None:
        ids, self._acknowledged = self._acknowledged, []
        if ids:
            self._settling.update(ids)
            with suppress(RuntimeError):  # the store is closed: the next run delivers these messages again
                self._settle(ids, lambda: self._soon(lambda: self._settled(ids)))

    def _settled(self, ids: Sequence[str]) -> None:
        self._settling.difference_update(ids)
        self._woken.set()

    def _soon(self, act: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: deliveries have ended
                self._loop.call_soon_threadsafe(act)

    def _look_at_limit(self) -> None:
        """Log once when the outbox begins to drop messages, and once when it stops."""
        if self._now_s >= self._refusal_until_s:
            self.refusal = None
        try:
            standing = self._outbox.standing(self._receiver.name)
        except (OSError, sqlite3.Error):  # reported by the reading of messages
            return
        before, self._given_way = self._given_way, standing.given_way
        if before is not None and standing.given_way > before and not self._is_giving_way:
            self._is_giving_way = True
            log.error(
                "outbox_full receiver=%s waiting=%d: the oldest messages give way until it takes some",
                self._receiver.name, standing.waiting,
            )  # fmt: skip
        elif self._is_giving_way and not self.alarm and not standing.waiting:
            self._is_giving_way = False
            log.warning("outbox_told receiver=%s given_way=%d", self._receiver.name, standing.given_way)

    def _raise_alarm(self, reason: str, shown_s: float = 0.0) -> None:
        self._alarm_until_s = self._now_s + shown_s
        if self.alarm != reason:
            log.error("receiver_unavailable receiver=%s reason=%s: messages wait", self._receiver.name, reason)
        self.alarm = reason

    def _end_alarm(self) -> None:
        if self.alarm is not None and self._now_s >= self._alarm_until_s:
            log.warning("receiver_available receiver=%s", self._receiver.name)
            self.alarm = None

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
