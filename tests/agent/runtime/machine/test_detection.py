"""What is built into a box, told by the kernel's own files."""

from __future__ import annotations

import pytest

from agent.runtime.machine.detection import has_nvidia_gpu


@pytest.mark.parametrize(
    ("vendor", "kind", "is_one"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x030200", True),
        ("0x10de", "0x040300", False),
        ("0x8086", "0x030000", False),
    ],
)
def test_a_gpu_is_known_by_its_vendor_and_class(tmp_path, vendor, kind, is_one):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "0000:01:00.0" / "class").write_text(f"{kind}\n")
    (tmp_path / "0000:02:00.0").mkdir()
    assert has_nvidia_gpu(tmp_path) is is_one
