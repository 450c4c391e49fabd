"""The file of a unix socket: whose it is, and who may connect.

Guarantees: while one process serves at a path no other takes it away, and what a dead one has left is replaced; it
appears with its permissions. gRPC by itself unlinks whatever lies at the path, so two agents would rob one another; a
server of Python's refuses to bind where anything lies.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from agent.line_file.api import SOCKET_PATH_BYTES, UNIX
from experts.errors import AddressUnusable

OWNERS, GROUPS = 0o600, 0o660  # its owner alone, and its group, too


class UnixSocket:
    """A path that is about to be served, locked for this process."""

    def __init__(self, address: str, mode: int = GROUPS) -> None:
        """Raises AddressUnusable if another process serves there, or nobody can."""
        self._address = address
        self._mode = mode
        self._path = Path(address.removeprefix(UNIX))
        self._hidden = Path(f"{self._path}~")  # where it is bound, until it may be seen
        if (size := len(os.fsencode(self._path))) > SOCKET_PATH_BYTES:
            raise AddressUnusable(address, f"{size} bytes of path, where {SOCKET_PATH_BYTES} are the most")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._check_place()
            self._hidden.unlink(missing_ok=True)  # of one that died before it was shown
        except OSError as error:  # of its folder, or its lock, which another user may have left
            raise AddressUnusable(address, f"{error.filename or self._path}: {error.strerror or error}") from error

    def _check_place(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.exists() and not stat.S_ISSOCK(self._path.stat().st_mode):
                raise AddressUnusable(self._address, "something lies there that is no socket")
        except BlockingIOError:
            os.close(self._lock)
            raise AddressUnusable(
                self._address, "another agent answers there", "stop it, or give this line another address"
            ) from None
        except AddressUnusable:
            os.close(self._lock)
            raise

    @property
    def to_bind(self) -> str:
        return f"{UNIX}{self._hidden}"

    def show(self) -> None:
        """It is bound: let it be found. Raises AddressUnusable."""
        try:
            self._hidden.chmod(self._mode)
            self._hidden.replace(self._path)
        except OSError as error:
            raise AddressUnusable(self._address, error.strerror or str(error)) from error

    def close(self) -> None:
        """Nobody is served there any more. The lock's file stays: who removed it could remove another's."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._lock)
