"""The arena of blocks: what texts share, how blocks of several layouts find room, and work on a device."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from experts.errors import MemoryExceeded
from experts.llm.arenas.blocks import UNBOUNDED_BYTES, BlockArena, BlockBuffer
from experts.llm.attention import Attention
from experts.llm.scoped_attention import AttentionScope, ScopedAttention
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.serving.test_arenas import HEADS, OTHER, SMALL, Texts, prefix_of

BLOCK_BYTES = 16 * SMALL.token_bytes
LARGE = replace(SMALL, layers=7)


@pytest.fixture
def copied(monkeypatch):
    """Positions of each copy between blocks."""
    counts, copy = [], BlockBuffer.copy

    def count(buffer, layout, source, target, positions):
        counts.append(positions)
        copy(buffer, layout, source, target, positions)

    monkeypatch.setattr(BlockBuffer, "copy", count)
    return counts


class TestSharing:
    @pytest.fixture
    def texts(self):
        return Texts(BlockArena(12 * BLOCK_BYTES))

    def test_prefix_is_shared_but_for_the_positions_of_its_last_block(self, texts, copied):
        read = texts.keep(SMALL, 70)
        assert texts.begin(2, SMALL, 90, prefix_of(86), like=read) == 70
        assert (copied, texts.arena.cached_bytes) == ([6], BLOCK_BYTES)
        texts.read({2: 1})
        texts.read({2: 9})

    def test_text_takes_over_the_beginning_of_one_under_way(self, texts, copied):
        texts.begin(1, SMALL, 100)
        texts.read({1: 40})
        texts.begin(2, SMALL, 70)
        texts.arena.share(2, 1, 36)
        texts.given[2] = [[one[:, :36] for one in layer] for layer in texts.given[1]]
        assert copied == [4]
        texts.read({1: 9, 2: 9})
        texts.end(1)
        texts.read({2: 20})

    def test_text_that_goes_back_leaves_shared_blocks_as_they_are(self, texts, copied):
        read = texts.keep(SMALL, 64)
        for request in (2, 3):
            texts.begin(request, SMALL, 80, prefix_of(64), like=read)
        texts.given[2] = [[one[:, :20] for one in layer] for layer in read]
        texts.read({2: 30, 3: 2})
        assert copied == [4], "of the block in which it goes on"
        texts.read({2: 1, 3: 1})
        texts.end(2)
        texts.end(3)
        assert texts.begin(4, SMALL, 80, prefix_of(70), like=read) == 64
        texts.read({4: 3})

    def test_texts_that_share_are_promised_room_of_their_own(self, texts):
        read = texts.keep(SMALL, 64)
        for request in (2, 3):
            texts.begin(request, SMALL, 96, prefix_of(64), like=read)
        with pytest.raises(MemoryExceeded):
            texts.begin(4, SMALL, 1)
        for request in (2, 3):
            texts.given[request] = [[one[:, :0] for one in layer] for layer in read]
        texts.read({2: 96, 3: 96})

    def test_last_block_is_not_shared_where_no_room_is_left_for_its_copy(self, texts):
        read = texts.keep(SMALL, 70, most=192)
        assert texts.begin(2, SMALL, 192, prefix_of(86), like=[[one[:, :64] for one in layer] for layer in read]) == 64
        texts.given[2] = [[one[:, :64] for one in layer] for layer in texts.given[2]]
        assert texts.arena.cached_bytes == 0
        texts.read({2: 100})


class TestRoom:
    @pytest.fixture
    def texts(self):
        """Texts of 24 blocks, of which every other one is given back."""
        texts = Texts(BlockArena(24 * BLOCK_BYTES, keeps_prefixes=False))
        for request in range(24):
            texts.begin(request, SMALL, 16)
            texts.read({request: 12})
        for request in range(0, 24, 2):
            texts.end(request)
        return texts

    def test_blocks_of_another_size_find_room_between_them(self, texts):
        texts.begin(30, LARGE, 48)
        texts.begin(31, OTHER, 16)
        texts.read({30: 40})
        texts.read({31: 10})
        texts.read(dict.fromkeys(range(1, 24, 2), 2))
        texts.read(dict.fromkeys((30,), 1))

    def test_blocks_of_a_batch_under_way_stay_where_they_are(self, texts):
        rows = [Chunk(request, 12, [0]) for request in range(1, 24, 2)]
        reserved = texts.arena.reserve(SMALL, TokenBatch.of(rows))
        with pytest.raises(MemoryExceeded):
            texts.begin(30, LARGE, 48)
        assert texts.arena.promised_bytes == 12 * BLOCK_BYTES
        for number, row in enumerate(rows):
            assert reserved.decode(1, 0).keys[number, :, :12].equal(texts.given[row.sequence][1][0])
        del reserved
        texts.begin(30, LARGE, 48)
        texts.read({30: 48})

    def test_unbounded_buffer_grows_with_its_texts(self):
        texts = Texts(BlockArena(UNBOUNDED_BYTES, keeps_prefixes=False))
        for request in range(4):
            texts.begin(request, SMALL, 16)
            texts.read({request: 16})
        for length in (500, 512):
            for request in range(4):
                texts.arena.grow(request, length)
            texts.read(dict.fromkeys(range(4), length - texts.length(0)))
        texts.begin(9, SMALL, 512)
        texts.begin(10, LARGE, 512)
        texts.read({10: 300})
        texts.end(10)
        texts.read({9: 512})


class Stream:
    def __init__(self, name, waits):
        self.name, self._waits = name, waits

    def wait_stream(self, other):
        self._waits.append((self.name, other.name))


@pytest.fixture
def cuda(monkeypatch):
    """Fake tensors on CUDA: to mix devices, or to ask for a value, raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("cuda", 0)


SCOPES = [None, AttentionScope(7, 0.2, None), AttentionScope(None, 0.2, 1.5), AttentionScope(64, 0.2, None)]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_on_a_device_mixes_no_devices_and_asks_for_no_value(cuda, dtype, scope):
    layout = replace(SMALL, dtype=dtype)
    arena = BlockArena(2**20, cuda)
    for request in range(4):
        arena.begin(request, layout, 100)
    for lengths in ((20, 40, 1, 1), (3, 1, 1, 1), (1, 1, 1, 1)):
        held = [arena._tables[request].held for request in range(4)]
        chunks = [Chunk(n, first, [0] * count) for n, (first, count) in enumerate(zip(held, lengths, strict=True))]
        batch = TokenBatch.of(chunks, cuda)
        reserved = arena.key_values(layout).reserve(batch)
        shape = (sum(lengths), layout.kv_heads, layout.head_size)
        keys, values = (torch.zeros(shape, dtype=dtype, device=cuda) for _ in range(2))
        queries = torch.zeros((len(keys), HEADS, layout.head_size), dtype=dtype, device=cuda)
        attention = ScopedAttention(batch, reserved, (scope,) * 2) if scope else Attention(batch, reserved)
        for layer in range(layout.layers):
            attended = attention.run(layer, queries, keys, values)
            assert (attended.shape, attended.device, attended.dtype) == (queries.shape, cuda, dtype)
    arena.release(0, prefix_of(23))
    assert arena.begin(5, layout, 80, prefix_of(30)) == 23
    arena.share(5, 1, 36)
    arena.grow(5, 200)
    arena.release(5, is_sound=False)


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        raise RuntimeError(f"{operation} on a lost device")


def test_texts_of_a_lost_device_are_released_without_it():
    arena = BlockArena(2**20)
    for request in (1, 2):
        arena.begin(request, SMALL, 100)
    arena.reserve(SMALL, TokenBatch.of([Chunk(1, 0, [0] * 50)]))
    with Refusing():
        arena.release(1, prefix_of(50))
        arena.release(2, is_sound=False)
        arena.set_budget(0)
    assert (arena.promised_bytes, arena.cached_bytes) == (0, 0)


def test_bytes_pass_between_streams_in_their_order(cuda, monkeypatch):
    waits = []
    streams = {name: Stream(name, waits) for name in "ab"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current = ["a"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    arena = BlockArena(2**20, cuda)
    arena.begin(1, SMALL, 20)
    assert waits == [], "there is one stream"
    current[0] = "b"
    arena.begin(2, SMALL, 20)
    assert waits == [("b", "a"), ("a", "b")], "its blocks were others', and are others' later"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arena.reserve(SMALL, TokenBatch.of([Chunk(1, 0, [0])], cuda))
    assert len(waits) == 2, "a batch waits for no other engine's"
