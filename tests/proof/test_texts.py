"""``coserve bench texts``: each row is measured or says why not, and a short figure says where its time goes."""

from dataclasses import replace

import pytest
import torch

from experts.errors import ConfigError
from experts.expert import Precision
from proof.llm import texts
from proof.llm.random_models import DENSE, TINY, TextJob
from proof.llm.text_times import LEAD, TimedTexts, TokenTimes

SMALL = replace(DENSE, name="small", layers=1, hidden=128, width=64, heads=2, kv_heads=1, head_size=64, vocabulary=4096)
EXTENT = texts.Extent(SMALL, TINY, 1, 1, 4, 0.25, 8, (Precision.INT4,), long_prompt=32, stall_bytes=2000, boards=2)


class FastServer:
    """llama.cpp's place, taken by a server that is never beaten."""

    greeting = "another server"

    def __init__(self, *settings):
        pass

    def timed(self, jobs, late=None):
        return [
            TokenTimes(0.0, [1e-9 * (1 + n) for n in range(job.output)]) for job in [*jobs, *([late] if late else [])]
        ]

    def close(self):
        pass


def measured(tmp_path, *rows):
    before = torch.get_num_threads()
    bench = texts.TextBench(tmp_path, EXTENT, tmp_path, threads=1)
    found = texts.measure_texts(tmp_path, lambda stage, done, total: None, bench, rows)
    torch.set_num_threads(before)
    assert not list(tmp_path.iterdir())
    return found


def test_rows_without_their_peer_say_so_and_the_others_are_measured(tmp_path):
    found = measured(tmp_path, "decode", "prefill", "speculation", "tokenising")
    cells = [(target.found, target.reached) for target in found.targets]
    assert cells[:2] == [(texts.ABSENT, None)] * 2
    assert len(cells) == 6
    assert all(reached is not None for _, reached in cells[2:])
    assert all(row.least <= row.value <= row.most for row in found.rows)
    assert "--llama-cpp FOLDER" in found.text()


def test_figure_short_of_its_target_says_where_its_time_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LlamaProcess", FastServer)
    monkeypatch.setattr(texts, "has_llama", lambda folder: True)
    found = measured(tmp_path, "decode", "first_token")
    assert [target.reached for target in found.targets] == [False] * 3
    assert sum(note.startswith("SHORT") and "MB of weights" in note for note in found.notes) == 3


def test_boards_are_timed_alone_and_beside_texts(tmp_path):
    found = measured(tmp_path, "beside_images")
    assert [row.what for row in found.rows][::2] == ["alone", "beside 4 texts"]
    assert all(row.least <= row.value <= row.most for row in found.rows[::2])
    assert found.targets[0].reached is not None


def test_unknown_row_is_refused_with_the_rows_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"--only decoed: no such row - choose from decode, slots"):
        measured(tmp_path, "decoed")


def test_late_text_begins_once_all_others_have_written_and_ends_the_run():
    begun = []
    course = TimedTexts([TextJob((1,), 9)] * 2, TextJob((2,), 1), lambda number, job: begun.append(number))
    assert not any(course.wrote(0) for _ in range(LEAD))
    assert begun == [0, 1]
    assert not any(course.wrote(1) for _ in range(LEAD))
    assert begun == [0, 1, 2]
    assert course.wrote(2)
    assert course.wrote(0)
