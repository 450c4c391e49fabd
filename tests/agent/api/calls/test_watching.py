"""A watcher that does not keep up, under a clock of the test's own: nothing is sent over a network here."""

from __future__ import annotations

import asyncio

import pytest

from agent.api.calls import watching
from agent.api.calls.desk import Order, Part
from agent.api.calls.orders import Orders
from agent.api.calls.watching import Watch
from experts.errors import OrderRefused, Refusing


def test_one_that_falls_too_far_behind_is_told_and_misses_no_result(desk, monkeypatch):
    monkeypatch.setattr(watching, "BOARDS_WAITING", 3)
    monkeypatch.setattr(watching, "PAGE", 2)
    numbers = []

    async def watch():
        orders = Orders(desk)
        events = Watch(orders, after_seq=0).events(asyncio.Event())
        for number in range(5):
            for component in ("resistor", "capacitor"):
                desk.commit(desk._part(Order(b"x", component=component, board=f"B{number}"), component))
            if not number:
                numbers.append((await anext(events)).seq)  # from now on it watches, and does not read
        await asyncio.sleep(0)
        try:
            async for event in events:
                numbers.append(event.seq if isinstance(event, Part) else event.serial)  # noqa: PERF401  # until it raises
        finally:
            await events.aclose()
            orders.stop()

    with pytest.raises(OrderRefused) as refused:
        asyncio.run(watch())
    assert refused.value.reason is Refusing.QUEUE_FULL
    assert [number for number in numbers if isinstance(number, int)] == list(range(1, 11))
    assert [number for number in numbers if isinstance(number, str)] == ["B1", "B2", "B3"]
    assert desk.watchers == 0
