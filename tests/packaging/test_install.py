"""install.sh over archives of small packages: installed, upgraded in place, rolled back, removed, below a folder.

The archives are written by the code of `make bundle`, around a `coserve` of a few lines. `packaging/prove-bundle.sh`
proves that the real one installs without a network; it takes gigabytes.
"""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agent.config import read_line

ROOT = Path(__file__).parents[2]
SHARED = {"coserve.service": "systemd", "coserve-profile.service": "systemd", "coserve.sysusers": "systemd",
          "coserve.tmpfiles": "systemd", "install.sh": "packaging", "line.yaml": "packaging"}  # fmt: skip

# Accepts a line file that does not hold the word that this version refuses.
COMMAND = """
import sys
from pathlib import Path
def main():
    print({version!r})
    if sys.argv[1:2] == ["config"]:
        sys.exit(78 if {refused!r} in Path(sys.argv[3]).read_text() else 0)
"""

# A pip that only unpacks these wheels: the real one takes seconds for each of a dozen installations.
PIP = """
import sys, zipfile, sysconfig
from pathlib import Path
site, prefix = Path(sysconfig.get_paths()["purelib"]), Path(sys.prefix)
if "install" in sys.argv:
    for wheel in sys.argv:
        if wheel.endswith(".whl"):
            zipfile.ZipFile(wheel).extractall(site)
    for data in site.glob("*.data/data/share"):
        data.rename(prefix / "share")
    command = prefix / "bin" / "coserve"
    command.write_text(f"#!{sys.executable} -I\\nimport coserve\\ncoserve.main()\\n")
    command.chmod(0o755)
"""


WITHOUT_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
sys.path[:] = ["{}", *(path for path in sys.path if path.endswith(("-packages", "lib-dynload")) or "python3" in path)]
sys.argv = ["coserve", "bench", "--help"]
import coserve
coserve.main()
"""


@pytest.fixture(scope="module")
def bundling():
    """packaging/make_bundle.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("make_bundle", ROOT / "packaging" / "make_bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder, name, version, files):
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return file


@pytest.fixture
def bundle(bundling, tmp_path):
    """Unpack an archive of a made-up version; its folder."""

    def make(version, refused="refused by none", imports=("coserve",)):
        wheels = tmp_path / f"wheels-{version}"
        wheels.mkdir(exist_ok=True)
        shared = {f"coserve-{version}.data/data/share/coserve/{name}": (ROOT / folder / name).read_text()
                  for name, folder in SHARED.items()}  # fmt: skip
        code = {"coserve.py": COMMAND.format(version=version, refused=refused)}
        made = [
            wheel(wheels, "coserve", version, code | shared),
            wheel(wheels, "pip", "1", {"pip/__init__.py": "", "pip/__main__.py": PIP}),
        ]
        archive = bundling.write_archive(tmp_path / "dist", made, version, imports)
        (tmp_path / "unpacked").mkdir(exist_ok=True)
        subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "unpacked"], check=True)
        return tmp_path / "unpacked" / archive.stem

    return make


class Box:
    def __init__(self, folder):
        self.folder = folder
        self.home = folder / "opt" / "coserve"
        self.line = folder / "etc" / "coserve" / "line.yaml"

    def install(self, bundle, *words, check=0, **extra):
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        command = ["sh", str(bundle / "install.sh"), "--root", str(self.folder), *words]
        environment = plain | {"PYTHON": sys.executable} | extra
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert done.returncode == check, done.stdout + done.stderr
        return done

    @property
    def version(self):
        command = self.folder / "usr" / "local" / "bin" / "coserve"
        return subprocess.run([command], capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    @property
    def releases(self):
        return {folder.name.partition("-")[0] for folder in self.home.iterdir() if not folder.is_symlink()}


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path / "box")


@pytest.fixture
def first(box, bundle):
    """The archive of version 1.0, which is installed."""
    made = bundle("1.0")
    box.install(made)
    return made


class TestInstallation:
    def test_install_is_complete_and_repeating_it_changes_nothing(self, box, first):
        assert box.version == "1.0"
        for unit in ("coserve.service", "coserve-profile.service"):
            assert (box.folder / "etc/systemd/system" / unit).read_text() == (ROOT / "systemd" / unit).read_text()
        assert box.line.read_text() == (ROOT / "packaging" / "line.yaml").read_text()
        assert (box.home / "current/share/coserve/install.sh").exists()
        made = (box.home / "current" / "pyvenv.cfg").stat().st_mtime_ns
        assert "complete already" in box.install(first).stdout
        assert (box.home / "current" / "pyvenv.cfg").stat().st_mtime_ns == made
        assert not (box.home / "previous").exists()

    def test_interrupted_install_is_repaired(self, box, first):
        (box.home / "current" / ".complete").unlink()
        (box.home / "current" / "bin" / "coserve").unlink()
        box.install(first)
        assert box.version == "1.0"

    def test_damaged_archive_is_refused(self, box, bundle):
        first = bundle("1.0")
        damaged = next(first.glob("wheels/coserve-*.whl"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        done = box.install(first, check=1)
        assert "damaged: copy it to this box again" in done.stderr
        assert damaged.name in done.stdout + done.stderr
        assert not (box.home / "current").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("key", "value", "told"),
        [
            ("tag", "other", "needs Python"), ("platform", "other", "needs Python"),
            ("glibc", "9.99", "needs glibc 9.99 or newer"), ("installed_bytes", str(10**17), "make room"),
        ],
    )  # fmt: skip
    def test_unsuitable_box_is_refused(self, box, bundle, bundling, key, value, told):
        first = bundle("1.0")
        self.change(first, bundling, key, value)
        assert told in box.install(first, check=1).stderr
        assert not (box.home / "current").exists()

    def test_packages_that_do_not_work_are_refused_and_the_current_version_stays(self, box, bundle, first):
        done = box.install(bundle("2.0", imports=("nothing_of_this_name",)), check=1)
        assert "nothing_of_this_name does not work on this box" in done.stderr
        assert box.version == "1.0"

    def change(self, bundle, bundling, key, value):
        file = bundle / "BUNDLE"
        lines = dict(line.split("=", 1) for line in file.read_text().splitlines()) | {key: value}
        file.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        sums = bundle / "SHA256SUMS"
        others = [line for line in sums.read_text().splitlines() if not line.endswith("  BUNDLE")]
        sums.write_text("\n".join([*others, f"{bundling.sha256(file)}  BUNDLE"]) + "\n")


class TestUpgrade:
    def test_upgrade_keeps_state_and_line_file_and_can_be_undone_and_redone(self, box, bundle, first):
        assert "no version before this one" in box.install(first, "--rollback", check=1).stderr
        box.line.write_text("line: mine\n")
        results = box.folder / "var/lib/coserve/results.db"
        results.write_text("a year of verdicts")
        box.install(bundle("2.0"))
        assert box.version == "2.0"
        own = box.home / "current/share/coserve"
        box.install(own, "--rollback")
        assert box.version == "1.0"
        box.install(own, "--rollback")
        assert box.version == "2.0"
        assert (box.line.read_text(), results.read_text()) == ("line: mine\n", "a year of verdicts")

    @pytest.mark.slow
    def test_upgrade_keeps_the_previous_version_and_no_older_one(self, box, bundle):
        for version, refused in (("1.0", "nothing"), ("2.0", "nothing"), ("2.0", "something")):
            box.install(bundle(version, refused))
        assert box.releases == {"2.0"}
        assert len([folder for folder in box.home.iterdir() if not folder.is_symlink()]) == 2
        box.install(box.home / "current/share/coserve", "--rollback")

    @pytest.mark.slow
    def test_version_that_refuses_the_line_file_is_not_installed_unless_forced(self, box, bundle, first):
        second = bundle("2.0", refused="top-side")
        assert "refuses" in box.install(second, check=1).stderr
        assert box.version == "1.0"
        box.install(second, "--force")
        assert box.version == "2.0"


@pytest.mark.slow
class TestRemoval:
    def test_removal_keeps_the_lines_files_unless_purged(self, box, first):
        (box.folder / "var/lib/coserve/results.db").write_text("verdicts")
        box.install(box.home / "current/share/coserve", "--remove")
        left = {str(file.relative_to(box.folder)) for file in box.folder.rglob("*") if file.is_file()}
        assert left == {"etc/coserve/line.yaml", "var/lib/coserve/results.db"}
        box.install(first, "--remove")  # again: nothing to do
        box.install(first)
        assert "usage" in box.install(first, "--purge", check=2).stderr
        box.install(first, "--remove", "--purge")
        assert [file for file in box.folder.rglob("*") if file.is_file() or file.is_symlink()] == []


class TestArchive:
    def test_archive_states_its_needs_and_has_checksums_of_everything(self, bundle):
        folder = bundle("1.0")
        about = dict(line.split("=", 1) for line in (folder / "BUNDLE").read_text().splitlines())
        assert about["tag"] == f"cp{sys.version_info.major}{sys.version_info.minor}"
        assert about["version"] == "1.0"
        assert int(about["installed_bytes"]) > 0
        summed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
        there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        assert summed == there - {"SHA256SUMS"}
        assert "install.sh" in summed

    def test_archive_needs_the_newest_glibc_of_its_wheels(self, bundling):
        names = ["a-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", "c-1-py3-none-any.whl",
                 "b-1-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"]  # fmt: skip
        assert bundling.glibc_needed(map(Path, names)) == (2, 27)
        assert bundling.glibc_needed([Path("c-1-py3-none-any.whl")]) == (0, 0)

    def test_archive_without_cuda_holds_no_cuda_wheel(self, bundling):
        plain = [Path("torch-2.15.0+cpu-cp311-cp311-linux_x86_64.whl"), Path("numpy-2.0-cp311.whl")]
        cuda = [Path("nvidia_cudnn_cu13-9-py3-none-any.whl"), Path("triton-3-cp311.whl"), Path("cuda_bindings-13.whl")]
        assert bundling.refuse_cuda(plain, has_cuda=False) == plain
        assert bundling.refuse_cuda([*plain, *cuda], has_cuda=True) == [*plain, *cuda]
        for wheel in cuda:
            with pytest.raises(SystemExit, match="CUDA=no"):
                bundling.refuse_cuda([*plain, wheel], has_cuda=False)

    @pytest.mark.slow
    def test_archive_runs_a_line_and_a_trace_and_holds_no_proof(self, bundling, tmp_path):
        sources = bundling.copied_sources(tmp_path / "sources")
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_CHECKOUT.format(sources)], capture_output=True, text=True, timeout=60,
            cwd=tmp_path, check=True,
        )  # fmt: skip
        assert "bench LINE.yaml --trace T" in done.stdout
        assert "compute" not in done.stdout

    def test_archive_pins_the_tested_versions(self, bundling):
        pinned = bundling.constraints()
        assert f"pytest=={pytest.__version__}\n" in pinned
        assert "coserve==" not in pinned
        assert "+cpu" not in pinned


def test_sample_line_is_valid_and_keeps_its_state_where_the_service_may_write():
    line = read_line(ROOT / "packaging" / "line.yaml", {})
    assert (line.state, line.intake.folders[0].path) == (Path("/var/lib/coserve"), Path("/srv/images"))
