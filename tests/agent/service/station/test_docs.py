"""What docs/api.md shows of `/api`, run as it stands there."""

import json
import re
import shlex
import subprocess
from pathlib import Path

from PIL import Image

from agent.service.station.served import OPERATIONS
from tests.agent.service.fake_line import asked, picture
from tests.lines import order as order_of

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text("utf-8")


def test_commands_of_the_page_show_an_ng_image_and_review_it(line):
    line.fake(0, label="bad")
    with line.served() as service:
        asked(service, order_of(picture(), component="c0", board="B1", ref="R1"))
        commands = re.findall(r"^curl .*coserve-web\.sock.*$", PAGE, re.MULTILINE)
        said = [
            subprocess.run(shlex.split(each), cwd=line.folder, capture_output=True, check=True, timeout=60).stdout
            for each in commands
        ]
    (found,) = json.loads(said[0])["results"]
    assert (found["seq"], found["verdict"]) == (1, "NG")
    with Image.open(line.folder / "ng.png") as shown:
        assert shown.size == (8, 8)
    assert json.loads(said[2])["finding"] == "false_call"


def test_page_lists_each_operation_with_its_role():
    told = {
        (operation, role)
        for operations, role in re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \| (\w+) \|", PAGE, re.MULTILINE)
        for operation in re.findall(r"`(.*?)`", operations)
    }
    known = {(f"{each.method} {each.path}", each.least.name.lower()) for each in OPERATIONS}
    assert told == known
