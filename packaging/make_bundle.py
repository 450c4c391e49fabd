"""Makes the archive that installs CoServe without a network: ``make bundle``.

It holds a wheel of every package in this environment's version, so that the tested versions are installed; a pip;
install.sh; a description (BUNDLE); licences that bind a distributor (LICENCES); and a sha256 of each file. It is a
plain tar: wheels are compressed already, and a box needs nothing to unpack it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
CPU_INDEX = (
    "https://download.pytorch.org/whl/cpu"  # torch and torchvision without CUDA, as a pair; PyPI has none for x86
)
CUDA_WHEELS = re.compile(r"(nvidia|cuda|triton)[_-]")
OWN = {"coserve", "opencv-python"}  # built from this checkout
# What install.sh tries.
IMPORTS = (
    "torch", "torchvision", "cv2", "av", "simplejpeg", "onnxruntime", "grpc", "agent.doors.http.metrics.monitoring",
    "agent.service.serve",
)  # fmt: skip
# What coserve's wheel is built from: everything but the proof, which no line needs, and the tests.
BUNDLED = ("agent", "docs", "experts", "packaging", "profiler", "systemd", "coserve.py", "LICENSE",
           "README.md", "pyproject.toml", "setup.py")  # fmt: skip
LEGACY_MANYLINUX = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)")
BYTECODE = 1.15  # an installation in relation to the files of its wheels
PART = 2 * 1024**3


def constraints() -> str:
    """The versions of this environment, as pip reads them; local parts (``+cpu``) are for the index to choose."""
    pinned = {each.name: each.version.partition("+")[0] for each in distributions() if each.name.lower() not in OWN}
    return "".join(f"{name}=={version}\n" for name, version in sorted(pinned.items()))


def collect_wheels(folder: Path, has_cuda: bool) -> list[Path]:
    """A wheel of every package that CoServe needs here. Raises SystemExit where one is missing."""
    pins = folder / "constraints.txt"
    pins.write_text(constraints())
    index = [] if has_cuda else ["--extra-index-url", CPU_INDEX]
    command = [sys.executable, "-m", "pip", "wheel", "--prefer-binary"]
    command += ["--wheel-dir", str(folder), "--constraint", str(pins)]
    own = copied_sources(folder / "coserve")
    wanted = [str(own / "packaging" / "opencv-python"), f"{own}[mqtt]", "pip"]
    if subprocess.run([*command, *index, *wanted], check=False).returncode != 0:
        raise SystemExit("make bundle: not every wheel can be had, see above: is the package index reached from here?")
    return refuse_cuda(sorted(folder.glob("*.whl")), has_cuda)


def copied_sources(folder: Path) -> Path:
    """Copy what is BUNDLED, without anything built before: setuptools would pack modules that are gone."""
    folder.mkdir(parents=True)
    built = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in BUNDLED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=built)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def refuse_cuda(wheels: list[Path], has_cuda: bool) -> list[Path]:
    """The wheels; without CUDA none may be of it, because torch loads what it was built with, or does not load."""
    of_cuda = [wheel.name for wheel in wheels if CUDA_WHEELS.match(wheel.name)]
    if of_cuda and not has_cuda:
        raise SystemExit(
            f"make bundle: CUDA=no, but the torch that was found needs {', '.join(of_cuda)}: {CPU_INDEX} has no build "
            "of this version - leave CUDA=no out, or install a version that it has and make the bundle again"
        )
    return wheels


def glibc_needed(wheels: Iterable[Path]) -> tuple[int, int]:
    """The oldest glibc that all of these wheels run with, by their names."""

    def oldest(wheel: Path) -> tuple[int, int]:
        tags = wheel.stem.rpartition("-")[2].split(".")
        named = [LEGACY_MANYLINUX[era] for tag in tags for era in LEGACY_MANYLINUX if tag.startswith(f"{era}_")]
        numbered = [(int(found[1]), int(found[2])) for tag in tags if (found := MANYLINUX.match(tag))]
        return min([*named, *numbered], default=(0, 0))

    return max(map(oldest, wheels), default=(0, 0))


def installed_bytes(wheels: Iterable[Path]) -> int:
    sizes = (entry.file_size for wheel in wheels for entry in zipfile.ZipFile(wheel).infolist())
    return int(sum(sizes) * BYTECODE)


def description(wheels: list[Path], version: str, imports: Iterable[str]) -> dict[str, str]:
    """Facts that install.sh reads from the archive."""
    major, minor = sys.version_info[:2]
    return {
        "version": version,
        "python": f"{major}.{minor}",
        "tag": f"cp{major}{minor}",
        "platform": sysconfig.get_platform().replace("-", "_"),
        "glibc": "{}.{}".format(*glibc_needed(wheels)),
        "installed_bytes": str(installed_bytes(wheels)),
        "imports": " ".join(imports),
    }


def write_archive(out: Path, wheels: list[Path], version: str, imports: Iterable[str] = IMPORTS) -> Path:
    """The archive, whole or not at all."""
    about = description(wheels, version, imports)
    name = f"coserve-{version}-{about['tag']}-{about['platform']}"
    told = "".join(f"{key}={value}\n" for key, value in about.items()).encode()
    files = {inside: ROOT / "packaging" / inside for inside in ("LICENCES", "install.sh")}
    files |= {f"wheels/{wheel.name}": wheel for wheel in wheels}
    sums = {"BUNDLE": hashlib.sha256(told).hexdigest()} | {inside: sha256(file) for inside, file in files.items()}
    listed = "".join(f"{digest}  {inside}\n" for inside, digest in sorted(sums.items())).encode()
    out.mkdir(parents=True, exist_ok=True)
    archive, part = out / f"{name}.tar", out / f".{name}.part"
    with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
        for inside, content in (("BUNDLE", told), ("SHA256SUMS", listed)):
            entry = tarfile.TarInfo(f"{name}/{inside}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for inside, file in files.items():
            tar.add(file, f"{name}/{inside}", filter=anonymous)
    part.replace(archive)
    return archive


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.name.endswith(".sh") else 0o644
    return entry


def advice(archive: Path) -> str:
    size = archive.stat().st_size
    lines = [f"{archive}: {size / 1e9:.2f} GB", f"on the box: tar xf {archive.name} && sudo {archive.stem}/install.sh"]
    if size > PART:
        lines.append(
            f"in parts of 2 GiB: split -b 2G {archive} {archive.name}. and there: cat {archive.name}.?? | tar x"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description="the archive that installs CoServe where there is no network")
    arguments.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments.add_argument("--cuda", choices=("yes", "no"), default="yes", help="no: for boxes without an NVIDIA GPU")
    given = arguments.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out, prefix=".wheels-") as folder:
        wheels = collect_wheels(Path(folder), has_cuda=given.cuda == "yes")
        print(advice(write_archive(given.out, wheels, version)))


if __name__ == "__main__":
    main()
