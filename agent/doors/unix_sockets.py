"""File of a unix socket: locked by its server, with permissions for its callers.

Guarantees: no process replaces the socket of a live one; a dead process's socket is replaced. The socket appears with
its permissions. Needed because gRPC unlinks any file at the path, and Python's servers refuse an existing path.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from agent.faults.errors import AddressUnusable
from agent.line_file.api import SOCKET_PATH_BYTES, UNIX

OWNERS, GROUPS = 0o600, 0o660  # mode: for the owner, for the group too


class UnixSocket:
    """Path of a socket, locked for this process."""

    def __init__(self, address: str, mode: int = GROUPS) -> None:
        """Raises AddressUnusable if another process serves there, or the path cannot be used."""
        self._address = address
        self._mode = mode
        self._path = Path(address.removeprefix(UNIX))
        self._hidden = Path(f"{self._path}~")  # bound here, then renamed
        if (size := len(os.fsencode(self._path))) > SOCKET_PATH_BYTES:
            raise AddressUnusable(address, f"the path has {size} bytes, and at most {SOCKET_PATH_BYTES} are possible")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._check_place()
            self._hidden.unlink(missing_ok=True)  # left by a process that died before ``show``
        except OSError as error:  # the folder, or another user's lock file
            raise AddressUnusable(address, f"{error.filename or self._path}: {error.strerror or error}") from error

    def _check_place(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.exists() and not stat.S_ISSOCK(self._path.stat().st_mode):
                raise AddressUnusable(self._address, "the file there is not a socket")
        except BlockingIOError:
            os.close(self._lock)
            raise AddressUnusable(
                self._address, "another agent answers there", "stop that agent, or give this line another address"
            ) from None
        except AddressUnusable:
            os.close(self._lock)
            raise

    @property
    def to_bind(self) -> str:
        return f"{UNIX}{self._hidden}"

    def show(self) -> None:
        """Publish the bound socket. Raises AddressUnusable."""
        try:
            self._hidden.chmod(self._mode)
            self._hidden.replace(self._path)
        except OSError as error:
            raise AddressUnusable(self._address, error.strerror or str(error)) from error

    def close(self) -> None:
        """Remove the socket. The lock file stays: a removal could hit another process's lock."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._lock)
