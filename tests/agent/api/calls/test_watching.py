"""A watcher that does not keep up, under a clock of the test's own: nothing is sent over a network here."""

import asyncio

from agent.api.calls import watching
from agent.api.calls.desk import ResultsCursor, VerdictView
from agent.api.calls.orders import Orders
from tests.lines import order as order_of


def test_one_that_falls_behind_misses_nothing(desk, monkeypatch):
    """However many boards are judged meanwhile, each is told behind its results."""
    monkeypatch.setattr(watching, "PAGE", 2)
    told = []

    async def watch_all():
        orders = Orders(desk)
        events = watching.watch(orders, ResultsCursor(None, 0, 0), asyncio.Event())
        for number in range(5):
            for component in ("resistor", "capacitor"):
                desk.commit(desk._part(order_of(b"x", component=component, board=f"B{number}"), component))
            if not number:
                told.append((await anext(events))[0])  # from now on it watches, and does not read
        await asyncio.sleep(0)
        while len(told) < 15:
            told.append((await anext(events))[0])
        await events.aclose()
        orders.stop()

    asyncio.run(watch_all())
    names = [event.seq if isinstance(event, VerdictView) else event.serial for event in told]
    assert [name for name in names if isinstance(name, int)] == list(range(1, 11))
    assert [name for name in names if isinstance(name, str)] == [f"B{number}" for number in range(5)]
    assert all(names.index(f"B{number}") > names.index(2 * number + 2) for number in range(5))
    assert desk.watchers == 0
