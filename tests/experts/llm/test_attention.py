"""Attention over mixed rows, against the formula; keys and values kept between iterations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.llm.attention import Attention, reference_attention
from experts.llm.config import parse_spec
from experts.llm.key_values import FIRST_POSITIONS, FIRST_SLOTS, ContiguousKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

KV_HEADS, HEAD_SIZE = 2, 8
LAYERS = 2


def spec_with(heads):
    return parse_spec(
        {
            "model_type": "llama", "vocab_size": 8, "hidden_size": heads * HEAD_SIZE, "intermediate_size": 8,
            "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        },
        "x",
    )  # fmt: skip


class Conversation:
    """Sequences that grow row by row: the store under test, and beside it all keys and values as they were given."""

    def __init__(self, heads, seed=0):
        self.heads = heads
        self.key_values = ContiguousKeyValues(spec_with(heads), torch.float32)
        self.given = {}
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, tokens, heads):
        return torch.randn((tokens, heads, HEAD_SIZE), generator=self.generator)

    def length(self, sequence):
        return len(self.given[sequence][0][0]) if sequence in self.given else 0

    def batch(self, counts):
        chunks = [Chunk(one, self.length(one), [0] * count) for one, count in counts.items()]
        return TokenBatch.of(sorted(chunks, key=lambda chunk: len(chunk.tokens) == 1))

    def go_on(self, counts):
        """The next tokens of these sequences: what every layer attends to, and what the formula says."""
        batch = self.batch(counts)
        attention = Attention(batch, self.key_values.reserve(batch))
        for layer in range(LAYERS):
            queries, keys, values = (self.random(len(batch.token_ids), n) for n in (self.heads, KV_HEADS, KV_HEADS))
            self.remember(layer, batch, keys, values)
            attended = attention.run(layer, queries, keys, values)
            whole = [torch.cat([self.given[row.sequence][layer][which] for row in batch.rows]) for which in (0, 1)]
            torch.testing.assert_close(attended, reference_attention(queries, *whole, batch.rows), atol=1e-5, rtol=1e-5)

    def remember(self, layer, batch, keys, values):
        empty = torch.zeros((0, KV_HEADS, HEAD_SIZE))
        for row, start in zip(batch.rows, batch.starts, strict=True):
            own = self.given.setdefault(row.sequence, [(empty, empty) for _ in range(LAYERS)])
            tokens = slice(start, start + row.count)
            own[layer] = (torch.cat((own[layer][0], keys[tokens])), torch.cat((own[layer][1], values[tokens])))

    def release(self, sequence):
        self.key_values.release(sequence)
        self.given.pop(sequence, None)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 7), st.sampled_from([1, 1, 1, 2, 5, 70]), min_size=1),
            st.sets(st.integers(0, 7), max_size=2),
        ),
        min_size=1, max_size=6,
    ),
    st.integers(0, 100),
)  # fmt: skip
def test_every_row_attends_to_its_sequence_up_to_itself(heads, steps, seed):
    conversation = Conversation(heads, seed)
    for counts, ended in steps:
        conversation.go_on(counts)
        for sequence in ended:
            conversation.release(sequence)
    assert conversation.key_values.sequences == {one: conversation.length(one) for one in conversation.given}


def test_decode_rows_far_apart_are_read_one_by_one():
    conversation = Conversation(4)
    for sequence in range(12):
        conversation.go_on({sequence: 3 + sequence})
    conversation.go_on({0: 1, 11: 1})  # 12 slots for two rows: gathered
    conversation.go_on({3: 1, 5: 1})  # 3 slots: the one between them is computed, too
    conversation.go_on({5: 1, 3: 1})


def test_slots_of_released_sequences_are_taken_again():
    conversation = Conversation(2)
    before = conversation.key_values.size_bytes
    for sequence in range(100):
        conversation.go_on({sequence: 3})
        conversation.release(sequence)
    assert conversation.key_values.size_bytes == before
    assert conversation.key_values.sequences == {}


def test_slots_and_positions_grow_by_doubling():
    conversation = Conversation(2)
    before = conversation.key_values.size_bytes
    conversation.go_on(dict.fromkeys(range(FIRST_SLOTS + 1), 2))
    assert conversation.key_values.size_bytes == 2 * before
    conversation.go_on({0: FIRST_POSITIONS})
    assert conversation.key_values.size_bytes == 4 * before


def test_a_sequence_may_be_taken_back():
    conversation = Conversation(4)
    conversation.go_on({1: 9, 2: 5})
    for layer in range(LAYERS):
        keys, values = conversation.given[1][layer]
        conversation.given[1][layer] = (keys[:4], values[:4])
    conversation.go_on({1: 3, 2: 1})
    assert conversation.key_values.sequences == {1: 7, 2: 6}


def test_a_sequence_has_no_holes():
    key_values = ContiguousKeyValues(spec_with(2), torch.float32)
    with pytest.raises(ValueError, match="sequence 7 holds 0 tokens, a row begins at 3"):
        key_values.reserve(TokenBatch.of([Chunk(7, 3, [0])]))
    assert key_values.sequences == {}


def test_to_release_what_is_not_there_is_nothing():
    key_values = ContiguousKeyValues(spec_with(2), torch.float32)
    key_values.release(3)
    key_values.reserve(TokenBatch.of([Chunk(3, 0, [0])]))
    key_values.release(3)
    key_values.release(3)
    assert key_values.sequences == {}


class TestABatch:
    def test_rows_and_tokens(self):
        batch = TokenBatch.of([Chunk(4, 2, [10, 11, 12]), Chunk(5, 0, [13]), Chunk(6, 7, [14])])
        assert batch.token_ids.tolist() == [10, 11, 12, 13, 14]
        assert batch.positions.tolist() == [2, 3, 4, 0, 7]
        assert batch.last.tolist() == [2, 3, 4]
        assert [row.sequence for row in batch.prefill_rows] == [4]
        assert [row.sequence for row in batch.decode_rows] == [5, 6]

    def test_a_row_of_one_token_before_longer_ones_is_read_as_they_are(self):
        batch = TokenBatch.of([Chunk(1, 0, [1]), Chunk(2, 0, [1, 2]), Chunk(3, 5, [1])])
        assert [row.sequence for row in batch.prefill_rows] == [1, 2]

    @pytest.mark.parametrize("chunks", [[], [Chunk(1, 0, [])], [Chunk(1, 0, [1]), Chunk(1, 1, [2])]])
    def test_what_is_no_batch(self, chunks):
        with pytest.raises(ValueError, match="row"):
            TokenBatch.of(chunks)
