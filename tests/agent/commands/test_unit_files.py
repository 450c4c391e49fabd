"""`coserve service install`: the printed script writes the shipped units, for this very agent."""

import subprocess
from pathlib import Path

import pytest

from agent.commands.unit_files import DESTINATIONS, UnitFiles, install, unit_files
from experts.errors import CoServeError
from tests.commands import coserve

ROOT = Path(__file__).parents[3]
ELSEWHERE = Path("/srv/venv/bin/coserve")
INSTALLED = Path("/opt/coserve/1.0-abc/bin/coserve")


def test_units_run_the_installed_or_the_given_command():
    shipped, elsewhere = unit_files(INSTALLED).files, unit_files(ELSEWHERE).files
    for name, path in DESTINATIONS.items():
        assert shipped[path] == (ROOT / "systemd" / name).read_text()
    for unit in ("coserve", "coserve-profile"):
        text = elsewhere[f"/etc/systemd/system/{unit}.service"]
        assert f"ExecStart={ELSEWHERE} " in text
        assert "/opt/coserve/current/bin" not in text


@pytest.mark.parametrize("home", ["/home/me", "/root"])
def test_command_in_a_home_folder_is_refused_as_services_do_not_see_it(home):
    with pytest.raises(CoServeError, match="does not see"):
        unit_files(Path(home) / "venv" / "bin" / "coserve")


def test_install_writes_the_unit_files_and_then_runs_the_commands(tmp_path):
    shipped = unit_files(INSTALLED).files
    files = {f"{tmp_path}{path}": text for path, text in shipped.items()}
    log = tmp_path / "log"
    units = UnitFiles(files, (f"echo done >> {log}",))
    install(units)
    install(units)  # again: the same
    assert {path: Path(path).read_text() for path in files} == files
    assert log.read_text() == "done\ndone\n"
    with pytest.raises(CoServeError, match="a step failed"):
        install(UnitFiles({}, ("false", f"touch {tmp_path}/after")))
    assert not (tmp_path / "after").exists()


@pytest.fixture
def seen_by_services():
    """Units do not see a checkout below /root or /home."""
    try:
        unit_files()
    except CoServeError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("seen_by_services")
def test_print_option_runs_nothing_and_prints_a_shell_script():
    done = coserve("service", "install", "--print")
    assert done.exit_code == 0, done.output
    for path in DESTINATIONS.values():
        assert path in done.stdout
    assert "systemctl daemon-reload" in done.stdout
    subprocess.run(["sh", "-n"], input=done.stdout, text=True, check=True)
