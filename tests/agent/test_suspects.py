"""One at a time, each once, in order."""

from __future__ import annotations

from agent.suspects import OneAtATime


def test_the_next_one_goes_in_when_the_one_before_has_left() -> None:
    inside: list[int] = []
    gate: OneAtATime[int] = OneAtATime(inside.append)
    for number in range(3):
        gate.put(f"key {number}", number)
    assert (inside, len(gate)) == ([0], 2)
    gate.left("key 2")
    gate.left("nobody")
    assert inside == [0]
    gate.left("key 0")
    gate.left("key 0")
    assert (inside, len(gate)) == ([0, 1], 1)
    gate.left("key 1")
    gate.left("key 2")
    gate.put("key 3", 3)
    assert (inside, len(gate)) == ([0, 1, 2, 3], 0)


def test_one_that_leaves_while_it_goes_in_lets_the_next_one_in() -> None:
    inside: list[int] = []

    def let_in(number: int) -> None:
        inside.append(number)
        gate.left(f"key {number}")

    gate: OneAtATime[int] = OneAtATime(let_in)
    for number in range(3):
        gate.put(f"key {number}", number)
    assert inside == [0, 1, 2]
