"""A line in small, for a power cut: accepts requests, keeps their images, stores verdicts, and tells all of it.

Its arguments: a folder, how many requests, and how SQLite is to sync instead of as the agent has it (- for that).
It says "accepted KEY" and "verdict KEY VERDICT KEPT_AS", each once that is on the disk, as it believes.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from agent.records import group_commit
from agent.records.outbox import Outbox
from agent.records.result_writer import ResultStore
from agent.records.retention.archive import ImageArchive
from agent.records.verdict import Result
from agent.subject import Subject
from experts.expert import Verdict
from tests.waiting import settled

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
VERDICTS = (Verdict.OK, Verdict.NG, Verdict.UNKNOWN)
IMAGE_BYTES = 9_000
AT_ONCE = 5


def image(number):
    return b"%08d" % number * (IMAGE_BYTES // 8)


def entry(number):
    return Subject(f"key-{number}", "api", f"{number}.png", NOON, "c", None, "B1", "main", "R1")


def verdict(number):
    return VERDICTS[number % len(VERDICTS)]


def say(text):
    os.write(1, f"{text}\n".encode())


class Line:
    def __init__(self, state):
        self.store = ResultStore(state / "results.db", followers=[Outbox("demo", ["mqtt"], ["result"], 100_000)])
        self._archive = ImageArchive(state / "images", "all")

    def work(self, numbers):
        """Accept so many; judge all but every seventh, some at a time."""
        for first in numbers[::AT_ONCE]:
            some = [number for number in range(first, first + AT_ONCE) if number in numbers]
            for number in some:
                self.store.accept(
                    [entry(number)], image(number), lambda _, number=number: say(f"accepted key-{number}")
                )
            settled(self.store)
            for number in some:
                if number % 7:
                    self._judge(number)
            settled(self.store)

    def _judge(self, number):
        kept_as = self._archive.keep(image(number), f"{number}.png", NOON)
        result = Result(entry(number), "demo", verdict(number), NOON, 0.1, "ab", kept_as=kept_as)
        self.store.record(result, lambda _: say(f"verdict {result.subject.key} {result.verdict} {kept_as}"))


def sync_as(setting):
    """Have every file that is opened from now on synced less than it is by the agent."""
    opens = group_commit.open_for_writing

    def open_for_writing(path, busy_timeout_s):
        database = opens(path, busy_timeout_s)
        database.conn.execute(f"PRAGMA synchronous = {setting}")
        return database

    group_commit.open_for_writing = open_for_writing


def main():
    """Two runs: the first is stopped in order, and folds its log in; the second ends without a word."""
    folder, count, setting = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if setting != "-":
        sync_as(setting)
    first = Line(folder / "line" / "state")
    first.work(range(count // 2))
    first.store.close()
    Line(folder / "line" / "state").work(range(count // 2, count))
    os._exit(0)


if __name__ == "__main__":
    main()
