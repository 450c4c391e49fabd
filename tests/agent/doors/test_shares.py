import asyncio

import pytest

from agent.doors.budget import Budget, Room
from agent.doors.shares import Shares, peer_of


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def taken(shares, peer, ended, count=1, size=1):
    return [shares.take(peer, lambda: ended.append(peer), size) for _ in range(count)]


def test_lone_peer_takes_all_places_and_yields_an_even_share_to_others():
    shares, ended = Shares(4), []
    first, *_ = taken(shares, "a", ended, 4)
    assert taken(shares, "a", ended) == [None]
    first.touch()
    assert all(taken(shares, "b", ended, 2))
    assert (ended, taken(shares, "b", ended)) == (["a", "a"], [None])
    assert first.size == 1  # heard last, so the others yielded
    assert all(taken(shares, "c", ended))
    assert (shares.held("a"), shares.held("b"), shares.held("c")) == (1, 2, 1)


def test_kept_place_never_yields():
    shares, ended = Shares(2), []
    (place,) = taken(shares, "a", ended)
    place.keep()
    assert shares.take("a") is not None
    assert (taken(shares, "b", ended), ended) == ([None], [])
    place.leave()
    place.leave()
    assert (shares.free, all(taken(shares, "b", ended))) == (1, True)


def test_silent_place_yields_to_any_peer_and_a_heard_one_does_not():
    clock, ended = Clock(), []
    shares = Shares(2, 20.0, clock)
    first, second = taken(shares, "a", ended, 2)
    clock.now_s = 19.0
    first.touch()
    assert taken(shares, "a", ended) == [None]
    clock.now_s = 20.0
    assert all(taken(shares, "a", ended))
    assert (taken(shares, "a", ended), first.size, second.size, ended) == ([None], 1, 0, ["a"])


def test_peer_with_most_places_yields_before_one_silent_for_longer():
    ended = []
    shares = Shares(3, 0.0)
    taken(shares, "b", ended)
    taken(shares, "a", ended, 2)
    assert all(taken(shares, "c", ended))
    assert ended == ["a"]
    assert all(taken(shares, "c", ended))
    assert ended == ["a", "b"]  # each had one


def test_place_yields_only_while_it_is_offered():
    shares, ended = Shares(1, 0.0), []
    place = shares.take("a")
    assert taken(shares, "b", ended) == [None]
    place.offer(lambda: ended.append("a"))
    assert all(taken(shares, "b", ended))
    place.offer(lambda: ended.append("a again"))
    assert all(taken(shares, "c", ended))
    assert ended == ["a", "b"]


def test_place_offered_again_keeps_its_turn_and_a_kept_one_comes_last():
    shares, ended = Shares(3, 0.0), []
    first, second, third = taken(shares, "a", ended, 3)
    first.offer(lambda: ended.append("first"))
    second.keep()
    second.offer(lambda: ended.append("second"))
    third.offer(lambda: ended.append("third"))
    assert all(taken(shares, "b", [], 2))
    assert ended == ["first", "third"]
    second.leave()
    second.offer(lambda: ended.append("late"))
    assert (shares.free, ended) == (1, ["first", "third"])


def test_yielded_bytes_are_not_counted_twice_for_a_late_message():
    shares, ended = Shares(40), []
    late, _ = taken(shares, "a", ended, 2, 20)
    assert all(taken(shares, "b", ended, size=20))
    late.keep(15)
    late.leave()
    assert (shares.free, shares.held("a"), ended) == (0, 20, ["a"])


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("ipv4:10.0.0.7:4321", "mes@10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:4321", "mes@[fd00::7]"),
        ("ipv4:127.0.0.1:4321", "mes@127.0.0.1:4321"),
        ("[::1]:4321", "mes@[::1]:4321"),
        ("unix:", "mes@unix"),
    ],
)
def test_peer_is_a_machine_or_a_local_connection(address, peer):
    assert peer_of("mes", address) == peer


def test_peer_without_bytes_is_served_before_those_that_wait_for_more():
    async def served():
        budget, order = Budget(2), []

        async def enter(peer):
            room = Room(budget, 1, 0, peer)
            await room.enter()
            order.append(peer)
            return room

        held = [await enter("a"), await enter("a")]
        waiting = [asyncio.create_task(enter(peer)) for peer in ("a", "a", "b")]
        await asyncio.sleep(0)
        for room in held:
            room.leave()
        await asyncio.gather(*waiting[::2])
        waiting[1].cancel()
        return order

    assert asyncio.run(served()) == ["a", "a", "b", "a"]
