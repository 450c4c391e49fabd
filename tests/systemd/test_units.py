"""The shipped units, as systemd itself reads them. AC29"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
EXPOSURE_LIMIT = 3.0
HIDES_GPUS = ("PrivateDevices", "MemoryDenyWriteExecute")  # the one hides them, the other ends their compilers
COMMAND = "/opt/coserve/current/bin/coserve"


def settings(unit: str) -> dict[str, list[str]]:
    """Every setting of a unit's text, with all of its values in order."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def verified(tmp_path):
    """Verify a unit whose command and document exist: an installation puts them there."""
    if shutil.which("systemd-analyze") is None:
        reason = "systemd-analyze is not installed: apt install systemd"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)

    def verify(name: str, text: str) -> subprocess.CompletedProcess[str]:
        unit = tmp_path / name
        unit.write_text(text.replace(COMMAND, "/bin/true"))
        return analyze("verify", "--man=no", str(unit))

    return verify


def test_there_are_two():
    assert [unit.name for unit in UNITS] == ["coserve-profile.service", "coserve.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
class TestAUnit:
    def test_is_verified_without_a_word(self, unit, verified):
        done = verified(unit.name, unit.read_text())
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_is_exposed_little(self, unit, verified):
        done = analyze("security", "--offline=yes", "--no-pager", str(unit))
        overall = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
        assert overall, done.stdout + done.stderr
        assert float(overall[1]) <= EXPOSURE_LIMIT

    def test_keeps_gpus_and_compilers_alive(self, unit):
        assert not settings(unit.read_text()).keys() & set(HIDES_GPUS)

    def test_lets_in_the_devices_that_its_clock_protection_shuts_out(self, unit):
        found = settings(unit.read_text())
        allowed = [value.split()[0].removeprefix("char-") for value in found["DeviceAllow"]]
        assert found["DevicePolicy"] == ["closed"]
        for name in ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps", "drm"):
            assert any(fnmatchcase(name, pattern) for pattern in allowed), name

    def test_runs_the_command_of_the_installation_in_force(self, unit):
        assert settings(unit.read_text())["ExecStart"][0].startswith(f"{COMMAND} ")

    def test_asks_for_no_group_that_may_be_missing(self, unit):
        made = {"video"} | set(re.findall(r"^[gu] (\S+)", (FOLDER / "coserve.sysusers").read_text(), re.MULTILINE))
        found = settings(unit.read_text())
        assert {*found["User"], *found["Group"], *found["SupplementaryGroups"][0].split()} <= made


def test_the_agent_is_watched_and_a_mistake_of_the_line_file_does_not_start_it_again():
    found = settings((FOLDER / "coserve.service").read_text())
    assert found["Type"] == ["notify"]  # notify-reload is not known to systemd 252, which would take it for simple
    assert found["WatchdogSec"] == ["30"]
    assert found["RestartPreventExitStatus"] == ["78"]
    assert found["Restart"] == ["on-failure"]


def test_it_reloads_where_there_is_no_bin_kill():
    """As in a bare Debian, which has no procps."""
    found = settings((FOLDER / "coserve.service").read_text())
    assert found["ExecReload"] == ["/bin/sh -c 'kill -HUP ${MAINPID}'"]
