"""The contract of arenas: budget, contents, attention over them, prefixes, and nothing left behind."""

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import MemoryExceeded
from experts.llm.arenas.extents import ExtentArena
from experts.llm.arenas.key_values import KvLayout, Prefix, common_length
from experts.llm.attention import Attention
from experts.llm.scoped_attention import AttentionScope, ScopedAttention
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.oracle import reference_attention
from tests.experts.llm.serving.conftest import ARENAS

BUDGET_BYTES = 2**20
SMALL = KvLayout(layers=2, kv_heads=2, head_size=16, positions=512, dtype=torch.float32)
OTHER = KvLayout(layers=1, kv_heads=1, head_size=80, positions=300, dtype=torch.bfloat16)
WIDE = replace(SMALL, positions=10**6)
WHOLE = BUDGET_BYTES // WIDE.token_bytes  # tokens that fill an arena
LAYOUTS = (SMALL, OTHER)
HEADS = 4


@pytest.fixture
def arena(made):
    return made(BUDGET_BYTES)


class Texts:
    """Requests that read random tokens: the arena under test, and beside it all keys and values as they were given."""

    def __init__(self, arena, seed=0, scope=None):
        self.arena = arena
        self.scope = scope
        self.layouts = {}
        self.most = {}
        self.given = {}
        self.generator = torch.Generator().manual_seed(seed)

    def begin(self, request, layout, tokens, prefix=None, like=None):
        held = self.arena.begin(request, layout, tokens, prefix)
        self.layouts[request] = layout
        shape = (layout.kv_heads, 0, layout.head_size)
        self.given[request] = [[torch.zeros(shape, dtype=layout.dtype)] * 2 for _ in range(layout.layers)]
        if held:
            self.given[request] = [[one[:, :held] for one in layer] for layer in like]
        return held

    def length(self, request):
        return self.given[request][0][0].shape[1]

    def read(self, counts):
        """So many tokens more of these requests of one layout: attention is that of all that was ever given."""
        layout = self.layouts[next(iter(counts))]
        chunks = [Chunk(one, self.length(one), [0] * count) for one, count in counts.items()]
        batch = TokenBatch.of(sorted(chunks, key=lambda chunk: len(chunk.tokens) == 1))
        reserved = self.arena.key_values(layout).reserve(batch)
        scopes = (self.scope,) * layout.layers
        attention = Attention(batch, reserved) if self.scope is None else ScopedAttention(batch, reserved, scopes)
        for layer in range(layout.layers):
            shapes = [(len(batch.token_ids), n, layout.head_size) for n in (HEADS, layout.kv_heads, layout.kv_heads)]
            queries, keys, values = (torch.randn(one, generator=self.generator).to(layout.dtype) for one in shapes)
            for row, start in zip(batch.rows, batch.starts, strict=True):
                own, tokens = self.given[row.sequence][layer], slice(start, start + row.count)
                for which, added in enumerate((keys, values)):
                    own[which] = torch.cat((own[which], added[tokens].transpose(0, 1)), dim=1)
            attended = attention.run(layer, queries, keys, values)
            self.compare(layer, batch, queries, attended, layout)

    def compare(self, layer, batch, queries, attended, layout):
        whole = [
            torch.cat([self.given[row.sequence][layer][which].transpose(0, 1) for row in batch.rows])
            for which in (0, 1)
        ]
        tolerance = 1e-5 if layout.dtype is torch.float32 else 3e-2
        expected = reference_attention(queries, *whole, batch.rows, self.scope)
        torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)

    def keep(self, layout, tokens, weights="w", *, most=None, **options):
        """A text that was read and is over; the keys and values of its prefix."""
        self.begin(1, layout, most or tokens)
        self.read({1: tokens})
        return self.end(1, prefix_of(tokens, weights), **options)

    def end(self, request, prefix=None, **options):
        self.arena.release(request, prefix, **options)
        self.layouts.pop(request, None)
        return self.given.pop(request, None)


@pytest.fixture
def texts(arena):
    return Texts(arena)


def test_closed_arena_holds_no_memory(arena, texts):
    texts.keep(SMALL, 40)
    texts.begin(2, SMALL, 40)
    texts.read({2: 3})
    arena.close()
    assert not arena.holds(2)
    assert (arena.promised_bytes, arena.cached_bytes, arena.idle_bytes) == (0, 0, 0)
    arena.release(2)


def prefix_of(tokens, weights="w"):
    return Prefix(weights, tuple(range(tokens)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 9), st.sampled_from(LAYOUTS), st.integers(1, 300)),
        st.tuples(st.just("read"), st.sets(st.integers(0, 9), min_size=1), st.sampled_from([1, 1, 1, 3, 40])),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(["keep", "drop", "wipe"])),
    ),
    max_size=30,
)  # fmt: skip


SCOPES = st.one_of(
    st.none(),
    st.builds(AttentionScope, st.sampled_from([None, 1, 7, 64]), st.just(0.2), st.sampled_from([None, 1.5])),
)


@pytest.mark.parametrize("made", ARENAS)
@given(STEPS, st.integers(0, 100), SCOPES)
def test_arena_keeps_contents_within_the_budget_under_any_steps(made, steps, seed, scope):
    arena = made(150_000)
    texts, promised, ended = Texts(arena, seed, scope), {}, 0
    for step in steps:
        match step:
            case "begin", request, layout, tokens if request not in promised:
                counted = arena.tokens_for(layout, tokens) * layout.token_bytes
                fits = sum(promised.values()) + counted <= arena.budget_bytes
                try:
                    assert texts.begin(request, layout, tokens, Prefix("w", tuple(range(9, 90)))) == 0
                except MemoryExceeded:
                    assert not fits
                else:
                    promised[request] = counted
                    texts.most[request] = tokens
            case "read", requests, count:
                for layout in LAYOUTS:
                    running = [one for one in requests if texts.layouts.get(one) == layout]
                    left = {one: texts.most[one] - texts.length(one) for one in running}
                    counts = {one: min(count, tokens) for one, tokens in left.items() if tokens > 0}
                    if counts:
                        texts.read(counts)
            case "end", request, how:
                ended += 1  # no two texts have a prefix in common
                tokens = (-ended, *range(texts.length(request) - 1)) if request in promised else ()
                texts.end(request, Prefix("w", tokens) if how == "keep" else None, is_sound=how != "wipe")
                promised.pop(request, None)
        taken_bytes = arena.promised_bytes + arena.cached_bytes + arena.idle_bytes
        assert taken_bytes <= arena.budget_bytes <= 150_000
        assert arena.promised_bytes <= sum(promised.values())


class TestPrefixes:
    def test_two_requests_continue_separately_from_a_prefix(self, texts):
        read = texts.keep(SMALL, 128)
        for request in (2, 3):
            assert texts.begin(request, SMALL, 300, prefix_of(128), like=read) == 128
        texts.read({2: 1, 3: 30})
        texts.read({2: 1, 3: 1})
        texts.end(2, prefix_of(128))
        texts.read({3: 1})

    def test_prefix_of_other_weights_or_layout_is_not_shared(self, texts):
        texts.keep(SMALL, 128)
        assert texts.begin(2, SMALL, 200, prefix_of(128, "others")) == 0
        assert texts.begin(3, replace(SMALL, layers=3), 200, prefix_of(128)) == 0

    def test_prefix_is_evicted_when_a_request_needs_its_room(self, arena, texts):
        texts.keep(WIDE, 512)
        assert arena.cached_bytes > 0
        assert texts.begin(2, WIDE, WHOLE) == 0
        assert arena.cached_bytes == 0
        with pytest.raises(MemoryExceeded):
            texts.begin(3, WIDE, 1)

    def test_prefix_is_reused_even_without_room_for_it_beside_the_request(self, texts):
        read = texts.keep(WIDE, 256, most=WHOLE)
        assert texts.begin(2, WIDE, WHOLE, prefix_of(300), like=read) == 256
        texts.read({2: 3})

    def test_least_recently_used_prefix_is_evicted_first(self, texts):
        read = {weights: texts.keep(WIDE, 128, weights) for weights in ("old", "used", "young")}
        texts.begin(2, WIDE, 200, prefix_of(128, "used"), like=read["used"])
        texts.end(2)
        texts.begin(3, WIDE, WHOLE - 256)
        texts.end(3)
        held = {}
        for weights in read:
            held[weights] = texts.begin(4, WIDE, 200, prefix_of(128, weights), like=read[weights])
            texts.end(4)
        assert held == {"old": 0, "used": 128, "young": 128}

    @pytest.mark.parametrize(("is_wanted", "is_sound"), [(False, True), (True, False)])
    def test_unwanted_or_unsound_prefix_is_not_kept(self, made, is_wanted, is_sound):
        arena = made(BUDGET_BYTES, keeps_prefixes=is_wanted)
        Texts(arena).keep(SMALL, 128, is_sound=is_sound)
        assert arena.cached_bytes == 0


def test_lowered_budget_drops_prefixes_and_keeps_promises(arena, texts):
    texts.keep(WIDE, 512)
    texts.begin(2, WIDE, 256)
    promised_bytes = arena.promised_bytes
    arena.set_budget(promised_bytes)
    assert (arena.cached_bytes, arena.idle_bytes, arena.promised_bytes) == (0, 0, promised_bytes)
    with pytest.raises(MemoryExceeded):
        texts.begin(3, WIDE, 1)
    texts.read({2: 200})
    arena.set_budget(2 * BUDGET_BYTES)
    assert arena.budget_bytes == BUDGET_BYTES
    texts.begin(3, WIDE, 1)


def read_nan(arena, request, first, count):
    key_values = arena.key_values(SMALL).reserve(TokenBatch.of([Chunk(request, first, [0] * count)]))
    nan = torch.full((count, SMALL.kv_heads, SMALL.head_size), float("nan"))
    for layer in range(SMALL.layers):
        key_values.append(layer, nan, nan)


def test_nan_in_the_cache_does_not_outlive_its_request(arena, texts):
    texts.begin(1, SMALL, 200)
    read_nan(arena, 1, 0, 150)
    arena.release(1, is_sound=False)
    texts.begin(2, SMALL, 200)
    texts.begin(3, SMALL, 200)
    texts.read({2: 2, 3: 100})
    texts.read({2: 1, 3: 1})


def test_nan_of_one_request_does_not_reach_its_neighbours(arena, texts):
    for request in (1, 2, 3):
        texts.begin(request, SMALL, 64)
        texts.read({request: 20 * request})
    read_nan(arena, 2, 40, 1)
    texts.read({1: 1, 3: 1})


@pytest.mark.parametrize(
    ("chunk", "told"),
    [(Chunk(1, 3, [0]), "holds 0 tokens, a row begins at 3"), (Chunk(1, 0, [0] * 400), "was promised"),
     (Chunk(7, 0, [0]), "request 7 has not begun")],
)  # fmt: skip
def test_rows_beyond_the_promise_are_refused(arena, chunk, told):
    arena.begin(1, SMALL, 100)
    with pytest.raises(ValueError, match=told):
        arena.key_values(SMALL).reserve(TokenBatch.of([chunk]))


def test_more_requests_than_extents_of_a_slab_are_held(made):
    arena = made(64 * 2**20)
    texts = Texts(arena)
    for request in range(150):
        texts.begin(request, SMALL, 5)
    texts.read(dict.fromkeys(range(150), 2))
    texts.read(dict.fromkeys(range(0, 150, 7), 1))
    texts.read({3: 1, 149: 1, 20: 2, 130: 2})


def test_slabs_are_small_if_addresses_are_few(monkeypatch):
    arena = ExtentArena(BUDGET_BYTES)
    most_bytes, map_all = [3 * SMALL.positions * SMALL.token_bytes], mmap.mmap

    def map_little(number, size_bytes, **options):
        if size_bytes > most_bytes[0]:
            raise OSError("no addresses")
        return map_all(number, size_bytes, **options)

    monkeypatch.setattr(mmap, "mmap", map_little)
    texts = Texts(arena)
    for request in range(5):
        texts.begin(request, SMALL, 5)
    texts.read(dict.fromkeys(range(5), 2))
    most_bytes[0] = 0
    with pytest.raises(MemoryExceeded, match="address space"):
        arena.begin(9, OTHER, 5)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_prefix_is_measured(one, other):
    expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_length(tuple(one), tuple(other)) == expected
