"""A lost device ends the agent and judges nothing; one that the device outlives is the batch's or the load's."""

from dataclasses import replace

import pytest
import torch

from agent.runtime.machine.detection import detect
from agent.runtime.machine.device_loss import DeviceContext, DeviceWatch, watch_of, watch_of_memory
from experts.errors import BackendUnavailable, LoadError, MemoryExceeded

LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0"),
]
UNCLEAR = [
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    BackendUnavailable("cuda", "cudaHostRegister failed with status 2: raise the limit of locked memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryExceeded("device", 2, 1),
    LoadError("cls/illegal memory access", "the drive hiccuped"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
]


def device_works():
    """What a device that answers does."""


def device_is_gone():
    raise torch.AcceleratorError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize("error", LOST, ids=str)
@pytest.mark.parametrize("watch", [DeviceWatch(), DeviceWatch("cuda", device_works)], ids=["nobody to ask", "works"])
def test_error_that_names_a_lost_device_is_believed(watch, error):
    lost = watch.lost_by(error)
    assert lost is not None
    assert str(error).splitlines()[0] in str(lost)
    assert "CUDA kernel errors" not in str(lost)


@pytest.mark.parametrize("error", UNCLEAR, ids=str)
def test_other_errors_are_judged_by_a_probe_of_the_device(error):
    assert DeviceWatch("cuda", device_works).lost_by(error) is None
    lost = DeviceWatch("cuda", device_is_gone).lost_by(error)
    assert lost is not None
    assert str(lost).startswith("the device cuda is lost: ")
    assert "unknown error" in str(lost)


def test_full_device_is_not_lost():
    def device_is_full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert DeviceWatch("cuda", device_is_full).lost_by(RuntimeError("no")) is None


def test_failure_of_the_cpu_never_probes_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", device_is_gone)
    split = replace(detect("emulated"), name="cuda", processors=("cuda", "cpu"))
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    watches = {name: watch_of(name) for name in ("cpu", "w1/cpu", "w1/cuda", "cuda")}
    watches |= {name: watch_of_memory(split, name) for name in ("host", "w1/host", "device", "w1/device")}
    probing = {name for name, watch in watches.items() if watch.lost_by(error) is not None}
    assert probing == {"cuda", "w1/cuda", "device", "w1/device"}


@pytest.mark.parametrize("finder", ["named", "probed", "given up"])
def test_lost_device_is_probed_no_more(monkeypatch, finder):
    probes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: probes.append("probe") or device_is_gone())
    context = DeviceContext()
    executor = watch_of("cuda", context)
    if finder == "given up":
        context.lose()
    else:
        assert executor.lost_by(LOST[0] if finder == "named" else UNCLEAR[0]) is not None
    jetson = replace(detect("integrated"), name="jetson", processors=("cuda", "cpu"))
    probes.clear()
    assert "it was lost before RuntimeError: cuDNN error" in str(watch_of("cuda", context).lost_by(UNCLEAR[0]))
    assert watch_of_memory(jetson, "host", context).lost_by(LoadError("cls/x", "the drive hiccuped")) is None
    assert probes == []
