"""docs/results.md says how things are: its YAML is valid, its JSON has today's keys, its programs run."""

import http.client
import json
import re
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from agent.line_file.records import ExportSection, OutboxSection, RecordsSection
from agent.records.boards import BoardVerdict
from agent.records.export import FIRST_S, ResultExport
from agent.records.outbox import Outbox, OutboxReader
from agent.records.result_writer import ResultStore
from agent.records.verdict import AlarmRow
from experts.expert import Verdict
from tests.lines import changed, result
from tests.waiting import settled

PAGE = (Path(__file__).parents[3] / "docs" / "results.md").read_text("utf-8")
AT = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
RESULT = result("k", Verdict.NG, arrived_at=AT, board="B1", board_type="main", ref="R1")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_sections_of_the_results_page_are_valid(tmp_path):
    (text,) = blocks("yaml")
    sections = yaml.safe_load(text)
    RecordsSection.model_validate(sections["records"], context={"folder": tmp_path})
    OutboxSection.model_validate(sections["outbox"], context={"folder": tmp_path})


def test_messages_of_the_results_page_have_the_real_keys(tmp_path):
    board = BoardVerdict("B1", "main", Verdict.NG, AT, AT, {}, {})
    outbox = Outbox("demo", ["mqtt"], ["board", "ng", "alarm"], 10)
    with closing(ResultStore(tmp_path / "r.db", followers=[outbox])) as store:
        store.record_board(board)
        store.record(RESULT)
        store.write(lambda database: outbox.alarm_stored(database, AlarmRow(1, "camera/belt", "OFFLINE", AT, AT)))
    told = [json.loads(message.payload) for message in OutboxReader(tmp_path / "r.db").waiting("mqtt", 10)]
    shown = [json.loads(block) for block in blocks("json")]
    assert [list(each) for each in shown] == [list(each) for each in told]
    assert [each["schema"] for each in shown] == [each["schema"] for each in told]


def test_program_of_the_results_page_reads_a_results_file(tmp_path):
    program = next(block for block in blocks("python") if "csv" in block)
    with closing(ResultStore(tmp_path / "r.db")) as store:
        store.record(RESULT)
        store.record(changed(RESULT, key="other", board=None))
        settled(store)
        section = ExportSection.model_construct(folder=tmp_path, format="csv")
        now_s = 0.0
        export = ResultExport(section, "demo", store, lambda: AT, lambda: now_s)
        now_s = FIRST_S
        while not (files := list(tmp_path.glob("results-*.csv"))):
            export.step()
    (file,) = files
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1 B1 r NG\n2  r NG\n"


@pytest.mark.parametrize("program", [block for block in blocks("python") if "http.server" in block])
def test_receiver_of_the_results_page_takes_each_message_once(program):
    program = program.replace('("127.0.0.1", 8080), Verdicts)', '("127.0.0.1", 0), Verdicts)')
    program = program.replace("ThreadingHTTPServer((", "server = ThreadingHTTPServer((").replace(
        ".serve_forever()", "\nprint(server.server_port, flush=True)\nserver.serve_forever()"
    )
    receiver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert receiver.stdout is not None
    port = int(receiver.stdout.readline())
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        for id_, block in (("1", 0), ("1", 0), ("2", 1), ("3", 2)):
            connection.request("POST", "/", blocks("json")[block].encode(), {"Idempotency-Key": id_})
            assert connection.getresponse().read() == b""
    receiver.kill()
    told, _ = receiver.communicate()
    assert told == "board PCB-0042 NG\nng PCB-0042 NG\nalarm camera/belt cleared\n"
