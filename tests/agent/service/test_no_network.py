"""The agent sends nothing: in a network namespace with a way out to everywhere, every packet is counted."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from agent.commands.asking import AgentAccess, generated, text_call
from experts.backends.vision.detector import build_trainable
from tests.agent import line_files
from tests.agent.service.fake_line import picture
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
SILENT_S = 30.0  # ONNX Runtime sends from 8 s to 20 s after its import

# Addresses of the documentation's own networks: nobody has them. Without ARP and IPv6 the kernel itself sends nothing.
WAY_OUT = """
set -e
for each in all default; do echo 1 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done 2>/dev/null || true
ip link set lo up
ip link add out type veth peer name wire
ip address add 192.0.2.1/24 dev out
ip link set wire arp off up
ip link set out arp off up
ip route add default dev out
exec "$@"
"""


class Namespace:
    """A process in a network namespace of its own; its counters can be read after it has ended."""

    def __init__(self, *command, **options):
        wrapped = ["unshare", "--net", "sh", "-c", WAY_OUT, "sh", *command]
        self.process = subprocess.Popen(wrapped, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        self._namespace = None

    def hold(self):
        """Keep the namespace, whose process runs in it by now."""
        self._namespace = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)

    def packets(self):
        command = ["nsenter", f"--net=/proc/self/fd/{self._namespace}", "cat", "/proc/net/dev"]
        done = subprocess.run(command, pass_fds=[self._namespace], capture_output=True, text=True, check=True)
        rows = [line.replace(":", " ").split() for line in done.stdout.splitlines()[2:]]
        return {fields[0]: int(fields[10]) for fields in rows}

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        if self._namespace is not None:
            os.close(self._namespace)


@pytest.fixture
def namespace():
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("a network namespace needs root, util-linux and iproute2")
    tried = subprocess.run(["unshare", "--net", "sh", "-c", WAY_OUT, "sh", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no network namespace with a way out here: {tried.stderr}")
    opened = []

    def start(*command, **options):
        opened.append(Namespace(*command, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_serving_and_judging_send_no_network_packet(namespace, line, tmp_path, tmp_path_factory, models):
    address = f"unix:{tmp_path_factory.mktemp('s')}/c.sock"  # is no network
    save_file(build_trainable("yolov5n", 2).state_dict(), tmp_path / "shift.safetensors")
    line.document["experts"] |= {
        "cls/f0": line_files.expert("shift.safetensors", "yolov5n", 64),
        "llm/code": {"architecture": "llm", "weights": str(models / "code")},
    }
    line.document |= {"memory": {"host": "160MiB"}, "api": {"http": address}}
    line.watch()
    line.drop("B1_c0_R1.png", picture(size=(64, 64)))
    agent = namespace(sys.executable, str(ROOT / "coserve.py"), "serve", str(line.write()))

    def is_judged():
        assert agent.process.poll() is None, agent.process.stderr.read()
        return line.shelf("done") + line.shelf("ng") + line.shelf("failed")

    until(is_judged)
    call = text_call("llm/code", "the quick", 5, None, (), {"temperature": 0.0})
    row = generated(None, AgentAccess(address), call, lambda _: None)
    agent.hold()
    agent.process.send_signal(signal.SIGTERM)
    _, err = agent.process.communicate(timeout=PATIENCE_S)
    assert (agent.process.returncode, row["written_tokens"]) == (0, 5), err
    assert [row.experts for row in line.rows] == [("cls/f0",)]
    assert agent.packets() == {"lo": 0, "out": 0, "wire": 0}


@pytest.mark.parametrize("to", ["198.51.100.1", "127.0.0.1"])
def test_network_packet_is_counted_by_the_test_itself(namespace, to):
    sends = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('{to}', 9))"
    sender = namespace(sys.executable, "-c", f"{sends}; print('sent', flush=True); input()", stdin=subprocess.PIPE)
    assert sender.process.stdout.readline() == "sent\n", sender.process.stderr.read()
    sender.hold()
    assert any(sender.packets().values())


@pytest.mark.slow
def test_onnx_runtime_sends_no_packet_in_the_minute_after_its_import(namespace):
    imports = "import experts.backends.onnx.backend, time; print('imported', flush=True); input()"
    idle = namespace(sys.executable, "-c", imports, stdin=subprocess.PIPE, cwd=ROOT)
    assert idle.process.stdout.readline() == "imported\n", idle.process.stderr.read()
    idle.hold()
    with pytest.raises(subprocess.TimeoutExpired):
        idle.process.wait(SILENT_S)
    assert idle.packets() == {"lo": 0, "out": 0, "wire": 0}


def test_onnx_runtime_is_told_to_send_no_telemetry_before_its_import():
    told = "import sys, os, experts; print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "1 False\n"
