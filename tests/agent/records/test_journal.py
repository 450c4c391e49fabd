"""The journal: what is accepted survives every end of the process, once, until it has its verdict."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.records.journal import Acceptance, JournalReader
from agent.records.result_writer import ResultStore
from agent.subject import Subject
from tests.lines import NOON, result
from tests.waiting import settled


def entry(key, **changes):
    made = Subject(key, "api", f"{key}.png", NOON, component="c0", board="b1", board_type="main", ref=key)
    return replace(made, **changes)


def accepted(store, entries, content=b"image"):
    told = []
    store.accept(entries, content, told.append)
    settled(store)
    return told[0]


def judged(store, key):
    store.record(result(key, component="c0"))
    settled(store)


def images_in(file):
    with closing(sqlite3.connect(file)) as connection:
        return int(connection.execute("SELECT count(*) FROM accepted_images").fetchone()[0])


def test_accepted_requests_are_read_back_unchanged_and_in_order(tmp_path):
    file = tmp_path / "r.db"
    first = entry("a", expert="cls/x", component=None, board=None, board_type=None, ref=None)
    second = entry("b", box=(1, 2, 30, 40))
    with closing(ResultStore(file)) as store:
        accepted(store, [first], b"one")
        accepted(store, [second], b"two")
    reader = JournalReader(file)
    found = reader.unfinished()
    assert [each.subject for each in found] == [first, second]
    assert [reader.content(each.image) for each in found] == [b"one", b"two"]


def test_journalled_image_is_kept_until_its_last_part_is_judged(tmp_path):
    file = tmp_path / "r.db"
    with closing(ResultStore(file)) as store:
        assert accepted(store, [entry("a"), entry("b"), entry("c")]) == [Acceptance.NEW] * 3
        assert images_in(file) == 1
        judged(store, "a")
        judged(store, "c")
        (left,) = JournalReader(file).unfinished()
        assert (left.subject.key, JournalReader(file).content(left.image)) == ("b", b"image")
        again = accepted(store, [entry("a"), entry("b"), entry("d")])
        assert again == [Acceptance.JUDGED, Acceptance.UNDER_WAY, Acceptance.NEW]
        assert [each.subject.key for each in JournalReader(file).unfinished()] == ["b", "d"]
        judged(store, "b")
        assert JournalReader(file).content(left.image) is None


@pytest.mark.parametrize("state", ["under way", "judged"])
def test_key_reused_for_another_request_is_reported_and_writes_nothing(tmp_path, state):
    file = tmp_path / "r.db"
    with closing(ResultStore(file)) as store:
        accepted(store, [entry("a#R1", asked_sha256="one"), entry("a#R2", asked_sha256="one")])
        if state != "under way":
            for key in ("a#R1", "a#R2"):
                store.record(result(key, asked_sha256="one"))
    with closing(ResultStore(file)) as store:
        for others in (["a"], ["a#R1"], ["a#R1", "a#R3"], ["a#R3"]):
            again = accepted(store, [entry(key, asked_sha256="two") for key in others], b"another image")
            assert again == [Acceptance.REUSED] * len(others)
        same = accepted(store, [entry("a#R1", asked_sha256="one"), entry("a#R2", asked_sha256="one")])
        assert same == [Acceptance.JUDGED if state == "judged" else Acceptance.UNDER_WAY] * 2
        assert accepted(store, [entry("ab", asked_sha256="two")]) == [Acceptance.NEW]
    reader = JournalReader(file)
    assert (reader.asked("a"), reader.asked("ab"), reader.asked("b")) == ({"one"}, {"two"}, set())


STEPS = st.lists(
    st.tuples(st.sampled_from(["accept", "judge", "withdraw", "restart"]), st.lists(st.integers(0, 6), max_size=4))
)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(steps=STEPS)
def test_request_is_unfinished_or_judged_after_any_sequence_of_steps(steps, tmp_path_factory):
    file = tmp_path_factory.mktemp("journal") / "r.db"
    store = ResultStore(file)
    unfinished = {}
    verdicts = set()
    for action, numbers in steps:
        keys = [str(number) for number in dict.fromkeys(numbers)]
        if action == "accept":
            store.accept([entry(key) for key in keys], b"image", lambda _: None)
            unfinished |= dict.fromkeys(key for key in keys if key not in verdicts and key not in unfinished)
        elif action == "judge":
            for key in keys:
                store.record(result(key))
                unfinished.pop(key, None)
                verdicts.add(key)
        elif action == "withdraw":
            store.withdraw(keys)
            for key in keys:
                unfinished.pop(key, None)
        else:
            assert store.close()
            store = ResultStore(file)
    assert store.close()
    reader = JournalReader(file)
    assert [each.subject.key for each in reader.unfinished()] == list(unfinished)
    assert all(reader.content(each.image) == b"image" for each in reader.unfinished())
    assert {row.subject.key for row in store.query()} == verdicts
    assert images_in(file) <= len(unfinished)
