"""The paper's devices: every constant has its source, and a file that cannot be meant is refused with its line."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from experts.errors import ConfigError
from proof.paper.devices import Constant, read_device

FOLDER = Path(__file__).parents[3] / "configs" / "devices"
NUMA, UMA = FOLDER / "numa-rtx3080ti.yaml", FOLDER / "uma-apple-m2.yaml"


def constants(value, path=""):
    """Each with its key."""
    if isinstance(value, Constant):
        yield path, value
    elif isinstance(value, BaseModel | dict):
        for key, below in dict(value).items():
            yield from constants(below, f"{path}.{key}")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_constant_says_where_it_is_from(file):
    found = dict(constants(read_device(file)))
    assert len(found) > 30
    for key, constant in found.items():
        if constant.source == "not in the paper":
            assert constant.derived.startswith("assumed"), key
        else:
            assert any(word in constant.source for word in ("Section", "Table", "Figure")), key
            assert constant.derived, key


def test_what_the_text_says_is_what_the_files_hold():
    numa, uma = read_device(NUMA), read_device(UMA)
    assert (numa.links.ssd_bytes_per_s.value, uma.links.ssd_bytes_per_s.value) == (530e6, 3000e6)
    resnet = uma.architectures["resnet101"]
    assert (resnet.gpu.max_batch.value, resnet.cpu.max_batch.value) == (6, 5)
    resnet = numa.architectures["resnet101"]
    assert resnet.weight_bytes.value == 44.5e6 * 4
    assert resnet.gpu.workspace_bytes.value == 1.5 * resnet.weight_bytes.value
    assert numa.usable_bytes("device") < 12 * 2**30
    assert (numa.pools, uma.pools) == (("host", "device"), ("host",))
    assert (numa.pool_of("gpu"), numa.pool_of("cpu"), uma.pool_of("gpu")) == ("device", "host", "host")


@pytest.mark.parametrize("file", [NUMA, UMA], ids=["numa", "uma"])
def test_the_shares_of_figure_1_hold(file):
    """From SSD, over 90 % of one image's latency is the switch; from host memory, 60 % at least."""
    for architecture in read_device(file).architectures.values():
        image_s = architecture.gpu.K_s.value + architecture.gpu.B_s.value
        assert image_s <= 0.040 + 1e-9
        load = architecture.framework_load_s
        assert load.ssd.value / (load.ssd.value + image_s) > 0.9
    host = read_device(NUMA).architectures["resnet101"].framework_load_s.host
    assert host is not None
    assert host.value / (host.value + 0.040) >= 0.6 - 1e-9


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("  source: \"Table 1: Apple M2\"\n  derived: an M2", "  derived: an M2", "cores.source: is missing"),
        ("    value: 3000e6", "    value: -1", "links.ssd_bytes_per_s.value"),
        ("layout: unified", "layout: split", "memories.device"),
        ("device: uma", "device: uma\ndevise: uma", "unknown key - did you mean 'device'"),
        ("      value: 8589934592", "      value: 25769803776", "the system takes all of it"),
        ("      value: [1.0, 1.075]", "      value: []", "processors.gpu.speedups.value"),
        ("        value: 6\n", "        value: 6.5\n", "max_batch.value"),
    ],
)  # fmt: skip
def test_a_device_file_that_cannot_be_meant_is_refused(tmp_path, written, instead, said):
    text = UMA.read_text()
    assert written in text
    file = tmp_path / "broken.yaml"
    file.write_text(text.replace(written, instead, 1))
    with pytest.raises(ConfigError) as refused:
        read_device(file)
    assert said in str(refused.value)
    assert f"{file}:" in str(refused.value)
