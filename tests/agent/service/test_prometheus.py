"""Prometheus of another machine: it scrapes a served line over TLS, with a token that may only read."""

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.waiting import until

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
OURS, THEIRS = "203.0.113.1", "203.0.113.2"  # of documentation: no network has them
TOKEN = "scrape-secret-token"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def elsewhere():
    """A network namespace that reaches this one by a pair of interfaces; the words that run a command there."""
    if shutil.which("prometheus") is None or shutil.which("ip") is None:
        pytest.skip("prometheus or ip is not installed: make tools")
    name, pair = f"coserve-{os.getpid()}", f"cs{os.getpid()}"
    if (made := ip("netns", "add", name)).returncode:
        pytest.skip(f"no network namespace may be made here: {made.stderr.strip()}")
    try:
        for words in (
            ("link", "add", f"{pair}a", "type", "veth", "peer", "name", f"{pair}b", "netns", name),
            ("addr", "add", f"{OURS}/30", "dev", f"{pair}a"),
            ("link", "set", f"{pair}a", "up"),
            ("-n", name, "addr", "add", f"{THEIRS}/30", "dev", f"{pair}b"),
            ("-n", name, "link", "set", f"{pair}b", "up"),
        ):
            done = ip(*words)
            assert done.returncode == 0, done.stderr
        yield ("ip", "netns", "exec", name)
    finally:
        ip("link", "del", f"{pair}a")
        ip("netns", "del", name)


@pytest.fixture
def line(line, authority):
    (line.folder / "scrape.token").write_text(TOKEN)
    line.document["api"] = {
        "grpc": [], "http": f"{OURS}:0",
        "tls": {"certificate": str(authority / "server.pem"), "key": str(authority / "server.key")},
        "tokens": {"prometheus": {"role": "read", "file": "./scrape.token"}},
    }  # fmt: skip
    return line


def documented(address, token, authority):
    """The docs' configuration, of this agent, and faster."""
    text = DOCS.read_text("utf-8").partition("## Prometheus")[2]
    configuration = yaml.safe_load(text.split("```yaml\n")[2].partition("```")[0])
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [address]}]
    job["authorization"]["credentials_file"] = str(token)
    job["tls_config"] = {"ca_file": str(authority / "ca.pem"), "server_name": "localhost"}  # what its certificate is for
    job["scrape_interval"] = job["scrape_timeout"] = "1s"
    return configuration


def test_a_line_is_scraped_with_tls_and_a_token_from_another_network(line, elsewhere, authority, tmp_path):
    with line.served() as service:
        address = service.web.addresses[0]
        token = tmp_path / "prometheus.token"
        token.write_text("wrong")
        file = tmp_path / "prometheus.yml"
        file.write_text(yaml.safe_dump(documented(address, token, authority)))
        command = [
            *elsewhere, "prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'series'}",
            f"--web.listen-address={THEIRS}:9090", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(command) as prometheus, httpx.Client(base_url=f"http://{THEIRS}:9090/api/v1", trust_env=False) as asked:
            try:

                def target():
                    try:
                        (found,) = asked.get("/targets").json()["data"]["activeTargets"]
                    except (httpx.TransportError, ValueError):  # it starts
                        return {}
                    return found

                until(lambda: target().get("health") == "down", lambda: str(target()))
                assert "401" in target()["lastError"]
                token.write_text(TOKEN)
                until(lambda: target()["health"] == "up", lambda: str(target()))
                (series,) = until(
                    lambda: asked.get("/query", params={"query": "coserve_ready"}).json()["data"]["result"]
                )
                assert series["value"][1] == "1"
                assert series["metric"]["instance"] == address
            finally:
                prometheus.terminate()
