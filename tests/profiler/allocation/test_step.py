"""The last step of a profile through the whole command: which images its search on the engine is shown."""

from __future__ import annotations

from PIL import Image

from profiler.allocation.search import SEARCHED_ON_ENGINE, SearchOptions
from profiler.allocation.step import ENGINE
from profiler.microbench.batches import BatchOptions
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from tests.profiler.lines import fakes, write_line

SEARCH = SearchOptions(engine_requests=20)


def test_a_search_on_the_engine_sees_defects_as_rarely_as_they_are_in_the_folder(tmp_path):
    """A tenth of 200 is bad. All of those break before the search: each that it comes to is told, and no other."""
    document = fakes(1, labels=["ok", "bad"]) | {"memory": {"host": "64MiB"}, "precision": "fp32"}
    config = write_line(tmp_path, document, weight_bytes=300_000, label="ok")
    for label, count in (("bad", 20), ("ok", 180)):
        (tmp_path / "crops" / "c0" / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "crops" / "c0" / label / f"{number:03}.png")

    def spoil(stage, done, total):
        if stage == "executors of cpu" and done == total:
            for path in (tmp_path / "crops" / "c0" / "bad").iterdir():
                path.write_bytes(b"no image")

    short = BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.5)
    samples = tmp_path / "crops"
    options = ProfilingOptions(samples, allocation=ENGINE, search=SEARCH, batches=short)
    done = profile_line(config, options, spoil)
    told = [note for note in done.notes if note.startswith(f"sample image {samples / 'c0' / 'bad'}")]
    assert 1 <= len(told) <= 4
    assert all(" was left out of the search: " in note for note in told)
    assert done.profile.allocation.origin == SEARCHED_ON_ENGINE
