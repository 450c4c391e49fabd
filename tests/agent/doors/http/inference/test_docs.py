"""What docs/api.md shows of /v2, run as it stands there but for the port."""

import json
import re
import shlex
import subprocess
from pathlib import Path

from agent.doors.http.inference.bodies import MOST_FIELDS, MOST_VALUES
from agent.doors.http.routes import STATUS

PAGE = (Path(__file__).parents[5] / "docs" / "api.md").read_text("utf-8")
PORT = "127.0.0.1:8462"


def test_examples_of_the_page_inspect_an_image_and_ask_about_a_file(served, desk, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("image.png").write_bytes(b"\xff an NG one")
    (snippet,) = (each for each in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if PORT in each)
    exec(snippet.replace(PORT, served.address), {})
    assert capsys.readouterr().out == "NG bad 0.75\n"
    assert [(part.subject.board, part.subject.ref) for part in desk.results] == [("B1042", "R17")]
    (command,) = re.findall(rf"^curl .*{PORT}.*$", PAGE, re.MULTILINE)
    words = shlex.split(command.replace(PORT, served.address))
    done = subprocess.run([*words, "--silent"], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout)["outputs"][0]["data"] == ["NG"]
    assert len(desk.results) == 1


def test_every_refusal_reason_is_on_the_page_with_its_http_status():
    about = PAGE[PAGE.index("Its status is 400") :].partition("\n\n")[0]
    found = {
        reason: int(status)
        for status, reasons in re.findall(r"(\d{3}) for ((?:`\w+`(?: and )?)+)", " ".join(about.split()))
        for reason in re.findall(r"\w+", reasons.replace(" and ", " "))
    }
    assert found == {str(reason): status for reason, status in STATUS.items() if reason != "CURSOR_UNKNOWN"}
    assert f"at most {MOST_VALUES:,} values and {MOST_FIELDS:,} fields" in " ".join(PAGE.split())
