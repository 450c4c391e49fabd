"""KServe's client, unmodified, from an environment of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KSERVE = Path(sys.prefix) / "kserve" / "bin" / "python"  # as `make kserve` installs it


@pytest.mark.slow
@pytest.mark.skipif(not KSERVE.exists(), reason="KServe's client is not installed: make kserve")
def test_kserves_client_judges_an_image(served, desk, tmp_path):
    image = tmp_path / "image.png"
    image.write_bytes(b"\x89PNG \xff an NG one")
    script = Path(__file__).with_name("asked_by_kserve.py")
    done = subprocess.run(
        [KSERVE, script, f"http://{served.address}", "expert:cls/capacitor", image, "B1"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["live"], told["ready"], told["models"]) == (True, True, [True, False])
    assert told["refused"].startswith("no route for 'nobody'")
    for form in ("json", "binary", "board"):
        assert told[form] == {"VERDICT": ["NG"], "LABEL": ["bad"], "SCORE": [0.75]}, form
    assert [part.subject.board for part in desk.results] == ["B1"]
