"""The gate: suspects alone, each once, in order; and the room that folders share."""

from hypothesis import given
from hypothesis import strategies as st

from agent.service.inspections.inspector import Gate
from agent.service.inspections.line import shares_room


class Room:
    """Who is inside, and who ever was; those let in stay until they are told to leave. Suspects are those with "?"."""

    def __init__(self):
        self.inside, self.ever, self.gate = [], [], Gate(self._let_in)

    def _let_in(self, item):
        self.inside.append(item)
        self.ever.append(item)
        return True

    def enter(self, item):
        self.gate.admit(item, is_suspect=item.endswith("?"))

    def leave(self, item):
        self.inside.remove(item)
        self.gate.leave()


def test_gate_admits_the_next_item_after_any_number_of_refused_ones():
    ever, items = [], list(range(10_003))

    def let_in(item):
        ever.append(item)
        if item == items[-2]:
            gate.leave()  # while it goes in
        return item in (0, *items[-2:])

    gate = Gate(let_in)
    for item in items:
        gate.admit(item, is_suspect=item == 0)
    assert ever == [0]
    gate.leave()
    assert ever == items


@given(st.lists(st.sampled_from(["enter", "suspect", "leave"]), max_size=60))
def test_gate_runs_suspects_alone_and_admits_each_item_once_in_any_order(moves):
    room, came = Room(), []
    for number, move in enumerate(moves):
        if move != "leave":
            came.append(f"{number}?" if move == "suspect" else f"{number}")
            room.enter(came[-1])
        elif room.inside:
            room.leave(room.inside[0])
        assert len(room.inside) == 1 or not any(item.endswith("?") for item in room.inside)
    while room.inside:
        room.leave(room.inside[0])
    for is_suspect in (True, False):
        ever, alike = ([each for each in items if each.endswith("?") is is_suspect] for items in (room.ever, came))
        assert ever == alike


def filled(held, limit, order):
    """What the folders hold once each of ``order`` has taken as many files as it may, in turn."""
    held = list(held)
    for index in order:
        while shares_room(held[index], held, limit):
            held[index] += 1
    return held


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 50))
def test_sources_share_the_in_flight_limit_without_starving_any(order, limit):
    held = filled([0] * 6, limit, order)
    assert sum(held) <= max(limit, 6)
    share = max(limit // 12, 1)
    assert all(count >= share or shares_room(count, held, limit) for count in held)
    assert sum(filled(held, limit, list(range(6)))) == max(limit, 6)
