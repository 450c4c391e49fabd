"""An arena's spans under any order of taking, giving back and sliding; over real memory, so that overlaps show."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.runtime.machine.arena import ALIGNMENT_BYTES, Arena, Span, aligned

PAGES = 32
CAPACITY = PAGES * ALIGNMENT_BYTES
# a size to take, "give <n>" the n-th living span back, "slide <n>" it down
STEPS = st.lists(
    st.one_of(
        st.integers(1, CAPACITY),
        st.tuples(st.sampled_from(["give", "slide"]), st.integers(0, PAGES)),
    ),
    max_size=60,
)


class Board:
    """Memory under an arena: every living span is painted with a colour of its own."""

    def __init__(self):
        self.arena = Arena(CAPACITY)
        self.pages = torch.zeros(PAGES, dtype=torch.int32)  # one number stands for each page
        self.living = {}  # span by colour
        self.colours = 0

    def take(self, size_bytes):
        span = self.arena.take(size_bytes)
        if span is not None:
            self.colours += 1
            self.living[self.colours] = span
            self._shown(span)[:] = self.colours
        return span

    def change(self, verb, number):
        if not self.living:
            return
        colour = sorted(self.living)[number % len(self.living)]
        span = self.living.pop(colour)
        if verb == "give":
            self.arena.give_back(span)
            return
        moved = self.arena.slide(span)
        self._shown(moved)[:] = self._shown(span).clone()
        self.living[colour] = moved

    def check(self):
        for colour, span in self.living.items():
            assert span.offset_bytes % ALIGNMENT_BYTES == 0
            assert span.offset_bytes >= 0
            assert span.end_bytes <= CAPACITY
            assert bool((self._shown(span) == colour).all())
        assert sorted(self.living.values()) == list(self.arena.taken)
        assert self.arena.free_bytes == CAPACITY - sum(span.size_bytes for span in self.living.values())

    def _shown(self, span):
        return self.pages[span.offset_bytes // ALIGNMENT_BYTES : span.end_bytes // ALIGNMENT_BYTES]


def largest_gap_bytes(board):
    spans = [*board.arena.taken, Span(CAPACITY, 0)]
    return max(after.offset_bytes - before.end_bytes for before, after in pairwise([Span(0, 0), *spans]))


def played(steps):
    board = Board()
    for step in steps:
        if isinstance(step, int):
            free_bytes, gap_bytes = board.arena.free_bytes, largest_gap_bytes(board)
            span = board.take(step)
            assert (span is None) == (aligned(step) > gap_bytes)
            assert span is None or board.arena.free_bytes == free_bytes - aligned(step)
        else:
            board.change(*step)
        board.check()
    return board


@given(STEPS)
def test_spans_never_overlap_and_keep_what_lies_in_them(steps):
    played(steps)


@given(STEPS)
def test_an_arena_that_has_everything_back_is_one_gap(steps):
    board = played(steps)
    for span in list(board.living.values()):
        board.arena.give_back(span)
    assert board.arena.take(CAPACITY) == Span(0, CAPACITY)


@given(STEPS)
def test_sliding_all_down_makes_one_gap_of_all_that_is_free(steps):
    board = played(steps)
    for colour in sorted(board.living, key=lambda colour: board.living[colour]):
        board.change("slide", sorted(board.living).index(colour))
        board.check()
    assert largest_gap_bytes(board) == board.arena.free_bytes


def test_what_was_not_taken_is_neither_given_back_nor_slid():
    arena = Arena(2 * ALIGNMENT_BYTES)
    span = arena.take(ALIGNMENT_BYTES)
    for misuse in (arena.give_back, arena.slide):
        with pytest.raises(ValueError, match="not taken"):
            misuse(Span(0, 2 * ALIGNMENT_BYTES))
    arena.give_back(span)
    with pytest.raises(ValueError, match="not taken"):
        arena.give_back(span)
