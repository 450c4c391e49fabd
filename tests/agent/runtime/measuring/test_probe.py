"""A rough matrix in seconds: measured over the real path, exact where bytes are concerned."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from agent.core.performance import SSD
from agent.runtime.machine.detection import detect
from agent.runtime.measuring.fits import LEAST_S
from agent.runtime.measuring.probe import LEAST_MAX_BATCH, SHORT, probe


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_every_expert_has_a_row_on_every_processor(line, device):
    box = detect(device)
    copies = {processor: list(line.copies.values()) for processor in box.processors}
    found = probe(box, copies, line.segments, {"cls/own-0": 0.5}, threads=1)
    assert (found.failed, found.matrix.usage) == ({}, {"cls/own-0": 0.5})
    for processor in box.processors:
        rows = found.matrix.experts[processor]
        assert rows.keys() == {copy.expert.id for copy in line.copies.values()}
        for copy in line.copies.values():
            row = rows[copy.expert.id]
            assert (row.copy, row.footprint) == (copy.name, copy.footprint)
            assert row.performance.K_s >= LEAST_S
            assert row.performance.B_s >= LEAST_S
            assert row.performance.max_batch in {LEAST_MAX_BATCH, *SHORT.sizes}
            assert row.performance.workspace_for(1) > 0
            sources = {SSD, "host"} if box.pool_of(processor) == "device" else {SSD}
            assert row.load_s.keys() == sources
            assert all(seconds > 0 for seconds in row.load_s.values())
    assert rows["cls/own-0"].performance == rows["cls/own-3"].performance, "one kind is measured once"


def test_broken_expert_is_not_taken_for_the_probe_of_its_kind(breakable_line):
    spoil(breakable_line, "own-0")
    breakable_line.file_of("kin-0").unlink()
    copies = [breakable_line.copy(name) for name in ("own-0", "kin-0", "own-1")]
    found = probe(detect("cpu"), {"cpu": copies}, breakable_line.segments, {}, threads=1)
    assert found.failed == {}
    found = probe(detect("cpu"), {"cpu": copies[:1]}, breakable_line.segments, {}, threads=1)
    assert "NaN or infinity" in found.failed["cls/own-0"]


def spoil(line, name):
    """Replace an expert's packed bytes by ones that are no numbers, as if they had been trained so."""
    copy = line.copy(name)
    content = np.full(copy.packed.own.size_bytes // 4, np.nan, dtype=np.float32).tobytes()
    own = replace(copy.packed.own, sha256=hashlib.sha256(content).hexdigest())
    line.segments.segment_path(own.sha256).write_bytes(content)
    line.copies[copy.name] = replace(copy, packed=replace(copy.packed, own=own))


def test_line_without_experts_has_an_empty_matrix(line):
    found = probe(detect("cpu"), {"cpu": []}, line.segments, {}, threads=1)
    assert found.matrix.experts == {"cpu": {}}
