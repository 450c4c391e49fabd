"""Rows of an iteration, laid flat. What attention computes over them: see serving/test_arenas.py."""

import pytest

from experts.llm.token_batch import Chunk, TokenBatch


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
