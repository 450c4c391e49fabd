"""The meter of workspaces: what it must see, and what it must not be fooled by."""

import sys

import numpy as np
import pytest
import torch

from agent.runtime.measuring.meter import CudaMeter, ResidentMeter, meter_for, sees_allocations, trial_peaks

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="resident peaks are Linux's")


@linux_only
class TestResidentMemory:
    def test_past_peak_of_memory_is_seen(self):
        meter = ResidentMeter()
        peak_bytes = meter.peak_bytes(lambda: np.ones(160 * MIB, dtype=np.uint8))
        assert 128 * MIB < peak_bytes < 224 * MIB

    def test_repeated_peak_is_seen_though_the_allocator_kept_the_memory(self):
        """Blocks of 8 MiB stay on the heap of the C library once some were freed: trimmed away before each run."""
        meter = ResidentMeter()

        def run():
            return [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(20)]

        peaks = [meter.peak_bytes(run) for _ in range(3)]
        assert min(peaks) > 128 * MIB

    def test_cpu_and_emulated_device_are_metered(self):
        assert sees_allocations(), f"a trial is seen as {trial_peaks()} bytes"
        assert isinstance(meter_for("cpu"), ResidentMeter)
        assert isinstance(meter_for("emulated"), ResidentMeter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_past_peak_of_cuda_memory_is_seen():
    meter = CudaMeter()
    assert meter.peak_bytes(lambda: torch.ones(96 * MIB, dtype=torch.uint8, device="cuda")) >= 96 * MIB
    assert meter.peak_bytes(lambda: None) < 96 * MIB
