"""One packing of a store at a time, whoever asks."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from experts.expert import Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore


def test_the_store_is_locked_while_it_is_packed_and_free_afterwards(files, store):
    refusals = []

    def try_to_lock(_step):
        with pytest.raises(BlockingIOError) as refused:
            lock_at_once(store)
        refusals.append(refused.value)

    pack_line([files.fake("cls/x")], lambda _: {Precision.FP32}, store, try_to_lock)
    assert len(refusals) == 1
    lock_at_once(store)


def lock_at_once(store):
    descriptor = os.open(store.directory / "packing.lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_several_packings_at_once_leave_a_sound_store(files, store):
    experts = [files.fake(f"cls/{number}") for number in range(6)]

    def pack(_):
        with closing(SegmentStore(store.directory)) as own:
            return pack_line(experts, lambda _: {Precision.FP32}, own)

    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(pack, range(4)))
    assert all(report == reports[0] for report in reports)
    assert not reports[0].failed
    for forms in reports[0].packed.values():
        store.verify(forms[Precision.FP32].own, "cls/x")
