"""Rows of an iteration, laid flat. What attention computes over them: see serving/test_arenas.py."""

from experts.llm.token_batch import Chunk, TokenBatch


def test_rows_and_tokens():
    batch = TokenBatch.of([Chunk(1, 0, [9]), Chunk(4, 2, [10, 11, 12]), Chunk(5, 0, [13]), Chunk(6, 7, [14])])
    assert batch.token_ids.tolist() == [9, 10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [0, 2, 3, 4, 0, 7]
    assert batch.last.tolist() == [0, 3, 4, 5]
    assert [row.sequence for row in batch.prefill_rows] == [1, 4]  # one of one token before a longer one is read, too
    assert [row.sequence for row in batch.decode_rows] == [5, 6]
