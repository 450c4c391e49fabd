"""Prometheus itself scrapes over TLS, with a token, from another network namespace."""

import http.client
import json
import os
import shutil
import subprocess
from contextlib import closing, contextmanager

import pytest

from agent.api.credentials import Credentials
from agent.line_file.api import ApiSection
from agent.web.monitoring import Monitoring
from agent.web.readings import Metric, MetricKind
from tests.agent.web.callers import PATIENCE_S, opened
from tests.agent.web.test_server import FakeLine
from tests.authority import Authority
from tests.waiting import until

HERE, THERE = "203.0.113.1", "203.0.113.2"  # of a network of the documentation's own
TOOLS = ("unshare", "ip", "prometheus", "openssl")
ANOTHER_MACHINE = f"""
set -e
ip link set lo up
ip link add out type veth peer name "$2" netns "$1"
ip address add {THERE}/24 dev out
ip link set out up
echo linked
shift 2
exec "$@"
"""


@contextmanager
def another_machine(*command):
    """A process in a network namespace that a wire joins to this one."""
    wire = f"cs{os.getpid()}"
    words = ["unshare", "--net", "sh", "-c", ANOTHER_MACHINE, "sh", str(os.getpid()), wire, *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout.readline() != "linked\n":
                pytest.skip(f"no network namespace can be joined to this one: {process.stderr.read()}")
            subprocess.run(["ip", "address", "add", f"{HERE}/24", "dev", wire], check=True)
            subprocess.run(["ip", "link", "set", wire, "up"], check=True)
            yield
        finally:
            process.kill()


def scraped():
    """Value and label `host` of a metric, and last error of each target, as Prometheus has them by now."""
    try:
        with closing(http.client.HTTPConnection(THERE, 9090, timeout=PATIENCE_S)) as caller:
            told = []
            for path in ("/api/v1/query?query=coserve_verdicts_total", "/api/v1/targets"):
                caller.request("GET", path)
                told.append(json.loads(caller.getresponse().read())["data"])
    except (OSError, ValueError):  # it starts
        return [], {}
    errors = {target["labels"]["job"]: target["lastError"] for target in told[1]["activeTargets"]}
    return [(each["metric"]["job"], each["value"][1]) for each in told[0]["result"]], errors


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason=f"needs root and {', '.join(TOOLS)}")
def test_prometheus_scrapes_with_a_token_and_no_other_way(tmp_path):
    Authority(tmp_path, "ours").sign("box")
    (tmp_path / "token").write_text("s3cret")
    tls = {"certificate": tmp_path / "box.pem", "key": tmp_path / "box.key"}
    keys = {"http": "0.0.0.0:0", "tls": tls, "tokens": {"prometheus": {"role": "read", "file": "token"}}}
    api = ApiSection.model_validate(keys, context={"folder": tmp_path})
    credentials, line = Credentials(api), FakeLine()
    line.told = [Metric(MetricKind.COUNTER, "verdicts", "Results stored.", {(): 4})]
    with opened([Monitoring(line).part()], api, tokens=credentials.tokens, tls=credentials.context()) as server:
        target = {"targets": [f"{HERE}:{server.addresses[0].rpartition(':')[2]}"]}
        trusts = {"ca_file": str(tmp_path / "ours.pem"), "server_name": "localhost"}
        shows = {"authorization": {"credentials_file": str(tmp_path / "token")}}
        usual = {"scrape_interval": "1s", "static_configs": [target]}
        jobs = [
            {"job_name": "token", "scheme": "https", "tls_config": trusts, **shows, **usual},
            {"job_name": "none", "scheme": "https", "tls_config": trusts, **usual},
            {"job_name": "plain", **shows, **usual},
        ]
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
        options = {"config.file": tmp_path / "prometheus.yml", "storage.tsdb.path": tmp_path / "data",
                   "web.listen-address": f"{THERE}:9090"}  # fmt: skip
        with another_machine("prometheus", *(f"--{name}={value}" for name, value in options.items())):
            until(lambda: scraped()[0] == [("token", "4")])
            until(lambda: scraped()[1]["none"] and scraped()[1]["plain"])
            found, errors = scraped()
    assert found == [("token", "4")]
    assert (errors["token"], "401" in errors["none"]) == ("", True)
