"""The snippets of docs/texts.md, run as they stand there but for the addresses."""

import json
import re
from pathlib import Path

import httpx2
import yaml

from agent.config import read_line
from agent.doors.http.texts.requests import chat_of
from tests.agent.doors.fake_desk import PROSE

PAGE = (Path(__file__).parents[5] / "docs" / "texts.md").read_text("utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TEXT = "".join(PROSE)


def run(snippet, address):
    exec(snippet.replace("127.0.0.1:8462", address), {})


def test_openai_client_example_of_the_page_prints_the_text(serve_texts, desk, capsys):
    (snippet,) = (each for each in SNIPPETS if "openai" in each)
    run(snippet, serve_texts()[0])
    assert (capsys.readouterr().out, desk.text_orders[0].most_tokens) == (f"{TEXT}\n", 200)


def test_commands_of_the_page_are_accepted_and_refused_as_it_shows(serve_texts):
    taken, refused = re.findall(r"-d '(.*)'$", PAGE, re.MULTILINE)
    assert chat_of(taken.encode()).orders[0].model == json.loads(taken)["model"] == "helpdesk"
    (told,) = re.findall(r"^{.error.*$", PAGE, re.MULTILINE)
    url = f"http://{serve_texts()[0]}/v1/completions"
    answer = httpx2.post(url, content=refused, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.text) == (400, told)


def test_line_file_of_the_page_is_valid(tmp_path):
    (document,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "line.yaml").write_text(document)
    config = read_line(tmp_path / "line.yaml", {})
    assert set(config.catalog.texts) == {"helpdesk"}
    assert yaml.safe_load(document)["api"]["http"] == ["unix:./state/coserve-web.sock", "127.0.0.1:8462"]
