"""`coserve service install`: the units of an agent that was installed with pip, as a shell script.

Guarantees: the printed script is the script that runs; its steps are idempotent. `make bundle` has another install.sh.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from experts.errors import CoServeError

HOME = Path("/opt/coserve")  # where install.sh installs; the shipped units name it
INSTALLED_COMMAND = HOME / "current" / "bin" / "coserve"
HIDDEN = ("/home", "/root", "/run/user")  # ProtectHome=
DESTINATIONS = {
    "coserve.service": "/etc/systemd/system/coserve.service",
    "coserve-profile.service": "/etc/systemd/system/coserve-profile.service",
    "coserve.sysusers": "/etc/sysusers.d/coserve.conf",
    "coserve.tmpfiles": "/etc/tmpfiles.d/coserve.conf",
}
COMMANDS = (
    "systemd-sysusers /etc/sysusers.d/coserve.conf",
    "systemd-tmpfiles --create /etc/tmpfiles.d/coserve.conf",
    "systemctl daemon-reload",
)
END = "END_OF_FILE"


@dataclass(frozen=True, slots=True)
class UnitFiles:
    files: dict[str, str]
    commands: tuple[str, ...] = COMMANDS

    def script(self) -> str:
        written = (
            f"mkdir -p {Path(path).parent}\ncat > {path} <<'{END}'\n{text.rstrip()}\n{END}\n"
            for path, text in self.files.items()
        )
        return "\n".join(["set -eu", *written, *self.commands, ""])


def unit_files(command: Path | None = None) -> UnitFiles:
    """Units that run ``command``. Raises CoServeError without the shipped files, or if no service can run it."""
    runs = command or _itself()
    folder = _shipped()
    texts = {path: (folder / name).read_text(encoding="utf-8") for name, path in DESTINATIONS.items()}
    if runs.is_relative_to(HOME):
        return UnitFiles(texts)
    if hidden := next((home for home in HIDDEN if runs.is_relative_to(home)), None):
        raise CoServeError(f"{runs}: a service does not see {hidden} - install CoServe elsewhere, for example in /opt")
    return UnitFiles({path: text.replace(str(INSTALLED_COMMAND), str(runs)) for path, text in texts.items()})


def install(units: UnitFiles) -> None:
    """Run the script. Raises CoServeError if a step fails, or is not allowed."""
    done = subprocess.run(["/bin/sh"], input=units.script(), text=True, check=False)
    if done.returncode != 0:
        raise CoServeError(f"a step failed, see above; this needs root: sudo {_itself()} service install")


def _itself() -> Path:
    return Path(sys.prefix) / "bin" / "coserve"


def _shipped() -> Path:
    checkout = Path(__file__).parents[2] / "systemd"
    installed = Path(sysconfig.get_path("data")) / "share" / "coserve"
    for folder in (checkout, installed):
        if (folder / "coserve.service").is_file():
            return folder
    raise CoServeError(f"the unit files are not in {installed}: install CoServe again")
