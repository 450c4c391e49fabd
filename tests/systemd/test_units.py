"""The shipped units, as systemd itself reads them."""

import os
import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "systemd"
EXPOSURE_LIMIT = 3.0
COMMAND = "/opt/coserve/current/bin/coserve"


def settings(unit):
    found = {}
    for key, value in re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def analyze(*words):
    command = ["systemd-analyze", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def verified(tmp_path):
    """Verify a unit whose command and document exist: an installation puts them there."""
    if shutil.which("systemd-analyze") is None:
        reason = "systemd-analyze is not installed: apt install systemd"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)

    def verify(name, text):
        unit = tmp_path / name
        unit.write_text(text.replace(COMMAND, "/bin/true"))
        return analyze("verify", "--man=no", str(unit))

    return verify


@pytest.mark.parametrize("name", ["coserve.service", "coserve-profile.service"])
class TestUnits:
    def test_unit_is_verified_without_a_warning_and_little_exposed(self, name, verified):
        done = verified(name, (FOLDER / name).read_text())
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        done = analyze("security", "--offline=yes", "--no-pager", str(FOLDER / name))
        overall = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
        assert overall, done.stdout + done.stderr
        assert float(overall[1]) <= EXPOSURE_LIMIT

    def test_unit_allows_the_devices_that_clock_protection_hides_and_ends_no_compiler(self, name):
        found = settings((FOLDER / name).read_text())
        allowed = [value.split()[0].removeprefix("char-") for value in found["DeviceAllow"]]
        assert found["DevicePolicy"] == ["closed"]
        for device in ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps", "drm"):
            assert any(fnmatchcase(device, pattern) for pattern in allowed), device
        assert not found.keys() & {"PrivateDevices", "MemoryDenyWriteExecute"}  # hides GPUs; ends their compilers

    def test_unit_runs_the_current_installation_and_names_no_group_that_may_be_missing(self, name):
        made = {"video"} | set(re.findall(r"^[gu] (\S+)", (FOLDER / "coserve.sysusers").read_text(), re.MULTILINE))
        found = settings((FOLDER / name).read_text())
        assert found["ExecStart"][0].startswith(f"{COMMAND} ")
        assert {*found["User"], *found["Group"], *found["SupplementaryGroups"][0].split()} <= made


def test_unit_watches_the_agent_and_does_not_restart_it_after_a_config_error():
    found = settings((FOLDER / "coserve.service").read_text())
    assert found["Type"] == ["notify"]  # notify-reload is not known to systemd 252, which would take it for simple
    assert (found["WatchdogSec"], found["RestartPreventExitStatus"]) == (["30"], ["78"])
    assert found["Restart"] == ["on-failure"]
    assert found["ExecReload"] == ["/bin/sh -c 'kill -HUP ${MAINPID}'"]  # a bare Debian has no bin/kill
