"""Makes the Python stubs of the protocols: `make proto` runs this with the interpreter that has grpcio-tools.

Guarantees: a stub names its source and the source's sha256, so that a stale stub is detected. A stub imports its
neighbours from its own package. Messages of a public protocol have a separate descriptor pool, so that a process may
load another client's stubs beside these.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
STUBS = ROOT / "agent" / "doors" / "proto"
SOURCES = ("coserve/v1/inspection.proto", "inference/inference.proto")
SHARED = ("inference/inference.proto",)  # public names: a client's stubs define them as well
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def make_stubs() -> None:
    """Write the stubs beside their sources, flat. Raises SystemExit for a source that does not compile."""
    with TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        words = ["protoc", f"-I{STUBS}", f"-I{WELL_KNOWN}", *outputs, *SOURCES]
        if protoc.main(words):
            sys.exit("the sources cannot be compiled: see above")
        for source in SOURCES:
            for made in sorted(Path(folder, source).parent.glob(f"{Path(source).stem}_pb2*")):
                (STUBS / made.name).write_text(_as_kept(made.read_text("utf-8"), source), encoding="utf-8")


def _as_kept(stub: str, source: str) -> str:
    package = str(Path(source).parent).replace("/", ".")
    stub = re.sub(rf"^from {re.escape(package)} import", "from agent.doors.proto import", stub, flags=re.MULTILINE)
    if source in SHARED:
        stub = stub.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
    sha256 = hashlib.sha256((STUBS / source).read_bytes()).hexdigest()
    return f"# Made by `make proto`, not by hand. Source: {source}\n# sha256 of the source: {sha256}\n{stub}"


if __name__ == "__main__":
    make_stubs()
