"""The shipped unit under a real systemd, in PID, mount, UTS, IPC and cgroup namespaces of its own.

That systemd sees no unit of the machine: its only ones are the shipped ones, in a /run of its own. /etc, /var and /opt
are overlays that vanish with it, /tmp, /var/tmp and /srv are empty. The unit runs as the user that the shipped sysusers
file makes, in the folders of the shipped tmpfiles file, hardened as shipped, but for what DROP_IN names.

Not exercised, because the controllers of such a namespace may belong to whoever started it: MemoryHigh=, MemoryMax=.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.service.fake_line import PATTERN, picture
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
LIFETIME_S = 240  # after which all of it is killed, whatever happens to the test
PATIENCE_S = 90.0
SLOW_START_S = 30

# Changes to the shipped unit. There is no journal, so stderr goes to a file. The watchdog and the restart come sooner:
# the test would take minutes. The end of each run is written down. The inbox is outside /var/lib/coserve, as on a real
# box, and is made accessible as docs/service.md says; so is a password.
DROP_IN = """
[Service]
StandardOutput=append:/var/log/%N.log
StandardError=append:/var/log/%N.log
WatchdogSec=15
RestartSec=200ms
ReadWritePaths=/srv/images
LoadCredential=mqtt.password:/etc/coserve/mqtt.password
ExecStopPost=/bin/sh -c 'echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS" >> /var/lib/coserve/%N.ends'
ExecStopPost=/bin/rm -f /var/lib/coserve/deadlock
"""

# /opt/coserve/current/bin/coserve of an installation: here the checkout, run by this Python from where a user without
# a home can read it.
COMMAND = """#!/bin/sh
here=/opt/coserve/current
export LD_LIBRARY_PATH="$here/python/lib" PYTHONPATH="$here/checkout:$here/packages"
exec "$here/python/bin/{python}" "${{COSERVE_PROGRAM:-$here/checkout/coserve.py}}" "$@"
"""

# The agent, whose Engine never comes back from an event while /var/lib/coserve/deadlock is there.
DEADLOCKING = """
import sys, threading
from pathlib import Path
from agent.core.engine import Engine
handle = Engine.handle
def handle_or_hang(self, event, now):
    if Path("/var/lib/coserve/deadlock").exists():
        lock = threading.Lock()
        with lock:
            lock.acquire()
    return handle(self, event, now)
Engine.handle = handle_or_hang
from coserve import main
main()
"""

# The agent, on a disk that takes longer to read the first expert than the unit's start may take.
SLOW_DISK = """
import time
started = time.monotonic()
from agent.deployment import build
pack_line = build.pack_line
def pack_slowly(experts, wanted, segments, step, in_use):
    def slow_step(told):
        step(told)
        time.sleep(max(0.0, {seconds} - (time.monotonic() - started)))
    return pack_line(experts, wanted, segments, slow_step, in_use)
build.pack_line = pack_slowly
from coserve import main
main()
"""

# Puts the files in place; then systemd becomes PID 1. All mounts are private: the machine's stay as they are.
SETUP = """
set -e
echo $$ > "$CGROUP/cgroup.procs"
exec unshare --pid --mount --uts --ipc --cgroup --fork --mount-proc --kill-child=SIGKILL /bin/sh -c '
set -e
mount --make-rprivate /
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind "$CONSOLE" /dev/console
mkdir -p "$PREPARED/layers"
mount -t tmpfs tmpfs "$PREPARED/layers"
for folder in etc var opt; do
  layer="$PREPARED/layers/$folder"
  mkdir -p "$layer/upper" "$layer/work"
  mount -t overlay -o "lowerdir=/$folder,upperdir=$layer/upper,workdir=$layer/work" overlay "/$folder"
done
here=/opt/coserve/current
mkdir -p $here/bin $here/python $here/packages $here/checkout
mount --bind "$PYTHON" $here/python
mount --bind "$PACKAGES" $here/packages
mount --bind "$CHECKOUT" $here/checkout
cp "$PREPARED"/bin/* $here/bin/
mkdir -p /etc/coserve && cp -r "$PREPARED"/etc/* /etc/coserve/
mount -t tmpfs tmpfs /run
cp -r "$PREPARED/units" /run/units
mkdir -p /run/systemd
mount -t tmpfs tmpfs /srv
mount -t tmpfs tmpfs /var/tmp
mount -t tmpfs tmpfs /tmp
systemd-sysusers $here/checkout/systemd/coserve.sysusers
systemd-tmpfiles --create $here/checkout/systemd/coserve.tmpfiles
chmod 0600 /etc/coserve/mqtt.password
for inbox in line slow; do install -d -o coserve -g coserve /srv/images/$inbox; done
mount --make-rshared /
exec env -i container=other SYSTEMD_UNIT_PATH=/run/units PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
  $MANAGER --system --unit=basic.target --log-target=console --show-status=false --log-color=no
'
"""


def cgroup_of_this_process():
    """The folder in the unified hierarchy; None where there is none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    at = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    inside = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    return at / inside[0].lstrip("/") if at and inside else None


def child_of(pid):
    if pid is None:
        return None
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


class PrivateSystem:
    """A private systemd, its console, and its files as seen from outside."""

    def __init__(self, prepared):
        self.console = b""
        self._cgroup = cgroup_of_this_process() / f"coserve-test-{os.getpid()}"
        self._cgroup.mkdir()
        self._master, slave = os.openpty()
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CGROUP": self._cgroup, "CONSOLE": os.ttyname(slave),
            "PREPARED": prepared, "PYTHON": sys.base_prefix, "PACKAGES": sysconfig.get_paths()["purelib"],
            "CHECKOUT": ROOT, "MANAGER": SYSTEMD,
        }  # fmt: skip
        self._complaints = prepared / "complaints"
        with self._complaints.open("w") as complaints:
            self._process = subprocess.Popen(
                ["timeout", "--kill-after=2", str(LIFETIME_S), "/bin/sh", "-c", SETUP],
                stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints,
                env={name: str(value) for name, value in environment.items()}, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()
        self._init = None

    def _listen(self):
        while True:
            try:
                self.console += os.read(self._master, 4096)
            except OSError:  # it has ended
                return

    def has_started(self):
        if self._process.poll() is not None:
            return False
        self._init = child_of(child_of(self._process.pid))  # timeout -> what was a shell, and is unshare -> PID 1
        if self._init is None or Path(f"/proc/{self._init}/comm").read_text().strip() != "systemd":
            return False
        return self.path("run/systemd/private").exists() and self.ask("is-system-running").strip() == "running"

    @property
    def refusal(self):
        return self._complaints.read_text() or "it ended" if self._process.poll() is not None else None

    def path(self, inside):
        return Path(f"/proc/{self._init}/root") / inside

    def run(self, *command):
        enter = ["nsenter", f"--target={self._init}", "--pid", "--mount", "--uts", "--ipc", "--cgroup"]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def systemctl(self, *words):
        done = self.run("systemctl", *words)
        assert done.returncode == 0, f"{done.stderr}{self.logs}"

    def ask(self, *words):
        return self.run("systemctl", *words).stdout

    def state(self, unit):
        """What ``systemctl show`` says of a unit."""
        return dict(line.partition("=")[::2] for line in self.ask("show", unit).splitlines())

    @property
    def logs(self):
        logs = "\n".join(
            f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.path("var/log").glob("coserve*.log")
        )
        return f"{self.console.decode(errors='replace')[-4000:]}\n{logs}"

    def wait_until(self, unit, **wanted):
        """Until a unit's state is as wanted; it is returned."""

        def is_so():
            state = self.state(unit)
            return state if all(state[key] == value for key, value in wanted.items()) else None

        return until(is_so, lambda: f"{unit} is not {wanted}\n{self.ask('status', unit)}{self.logs}")

    def ends(self, unit):
        file = self.path(f"var/lib/coserve/{unit}.ends")
        return file.read_text().splitlines() if file.exists() else []

    def drop(self, name):
        """An image into the inbox, complete at once."""
        inbox = self.path("srv/images/line")
        inbox.joinpath(".part").mkdir(exist_ok=True)
        (inbox / ".part" / name).write_bytes(picture())
        (inbox / ".part" / name).rename(inbox / name)

    def wait_for_verdict(self, name):
        until(lambda: any((self.path("srv/images/line") / "done").rglob(name)), lambda: self.logs)

    def end(self):
        if self._init is not None and self._process.poll() is None:
            os.kill(self._init, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._master)
        until(self._is_removed)

    def _is_removed(self):
        for folder in sorted([self._cgroup, *self._cgroup.rglob("*/")], reverse=True):
            with suppress(OSError):  # it still has processes
                folder.rmdir()
        return not self._cgroup.exists()


def line_document(name):
    """A line of two fake experts that judge whatever lies in its inbox."""
    expert = {"architecture": "fake", "labels": ["ok", "bad"], "input": {"size": [8, 8]}}
    return {
        "line": name,
        "state": f"/var/lib/coserve/{name}",
        "experts": {f"cls/f{number}": expert | {"weights": f"weights/f{number}.yaml"} for number in range(2)},
        "routes": {f"c{number}": [{"expert": f"cls/f{number}", "pass": ["ok"]}] for number in range(2)},
        "memory": {"host": "20MiB", "workspace": "10MiB"},
        "intake": {"folders": [{"path": f"/srv/images/{name}", "pattern": PATTERN, "settle_ms": 0, "poll_s": 0.2}]},
    }


def prepare(folder):
    """Units, commands and line files, as SETUP puts them in place."""
    shipped = (ROOT / "systemd" / "coserve.service").read_text()
    programs = "Environment=COSERVE_PROGRAM=/opt/coserve/current/bin"
    drop_ins = {
        "coserve": f"{DROP_IN}{programs}/deadlocking.py\n",
        "coserve-slow": f"{DROP_IN}TimeoutStartSec={SLOW_START_S}\n{programs}/slow_disk.py\n",
        "coserve-mistaken": DROP_IN,
        "coserve-crashing": f"{DROP_IN}ExecStart=\nExecStart=/bin/false\n",
    }
    files = {
        "bin/coserve": COMMAND.format(python=f"python{sys.version_info.major}.{sys.version_info.minor}"),
        "bin/deadlocking.py": DEADLOCKING, "bin/slow_disk.py": SLOW_DISK.format(seconds=SLOW_START_S + 2),
        "etc/mqtt.password": "from the factory\n",
        "etc/mistaken.yaml": "line: mistaken\nstate: /var/lib/coserve/mistaken\nexperts: 7\n",
    }  # fmt: skip
    for unit, drop_in in drop_ins.items():
        line = unit.removeprefix("coserve-") if unit != "coserve" else "line"
        files[f"units/{unit}.service"] = shipped.replace("coserve/line.yaml", f"coserve/{line}.yaml")
        files[f"units/{unit}.service.d/test.conf"] = drop_in
    for target in ("basic", "sysinit", "shutdown"):  # without the machine's units that usually belong to them
        files[f"units/{target}.target"] = "[Unit]\nDefaultDependencies=no\n"
    files |= {f"etc/{line}.yaml": json.dumps(line_document(line)) for line in ("line", "slow")}
    files |= {f"etc/weights/f{n}.yaml": json.dumps({"weight_bytes": 100_000, "label": "ok"}) for n in range(2)}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin" / "coserve").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("namespaces for a systemd of its own need root")
    if not SYSTEMD.exists() or not all(map(shutil.which, ("unshare", "nsenter", "timeout", "systemd-sysusers"))):
        pytest.skip("systemd or util-linux is not installed")
    if (cgroup := cgroup_of_this_process()) is None or not os.access(cgroup, os.W_OK):
        pytest.skip("no cgroup of the unified hierarchy that may be divided")
    started = PrivateSystem(prepare(tmp_path_factory.mktemp("systemd")))
    try:
        until(lambda: started.has_started() or started.refusal)
        if started.refusal:
            pytest.skip(f"namespaces are not allowed here: {started.refusal}")
        started.systemctl("start", "--no-block", "coserve-slow")  # the last test looks how that went
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def running(system):
    system.systemctl("start", "coserve")  # comes back when the agent is ready, or has failed
    return system


def test_mistake_in_the_line_file_ends_with_78_and_is_not_restarted(system):
    assert system.run("systemctl", "start", "coserve-mistaken").returncode != 0
    state = system.wait_until("coserve-mistaken", ActiveState="failed")
    assert (state["ExecMainStatus"], state["NRestarts"]) == ("78", "0")
    assert "/etc/coserve/mistaken.yaml:3" in state["StatusText"]
    assert "mistaken.yaml:3" in system.path("var/log/coserve-mistaken.log").read_text()
    assert system.ends("coserve-mistaken") == ["exit-code exited 78"]


def test_agent_that_crashes_again_and_again_is_never_given_up(system):
    """The agent spaces its own starts; this one, which is none, comes back every RestartSec."""
    system.run("systemctl", "start", "coserve-crashing")
    until(lambda: len(system.ends("coserve-crashing")) > 6, lambda: system.logs)
    assert "Start request repeated too quickly" not in system.console.decode()
    system.systemctl("stop", "coserve-crashing")


@pytest.mark.slow
def test_systemd_sees_the_agent_ready_and_it_judges_under_the_shipped_hardening(running):
    state = running.wait_until("coserve", ActiveState="active", SubState="running")
    assert state["StatusText"].startswith(("0/2", "1/2", "2/2")), state["StatusText"]
    status = running.path(f"proc/{state['MainPID']}/status").read_text()
    user = running.run("id", "-u", "coserve").stdout.strip()
    assert f"\nUid:\t{user}\t{user}\t{user}\t{user}\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    assert "\nSeccomp:\t2\n" in status
    assert "\nCapBnd:\t0000000000000000\n" in status
    running.drop("B1_c0_R1.png")
    running.wait_for_verdict("B1_c0_R1.png")


@pytest.mark.slow
def test_agent_reads_and_writes_only_where_the_unit_allows(running):
    user, group = (running.run("id", which, "coserve").stdout.strip() for which in ("-u", "-g"))

    def enter(*command):
        return running.run("nsenter", f"--target={running.state('coserve')['MainPID']}", "--mount", *command)

    def is_writable(folder):
        return enter("touch", f"{folder}/written").returncode == 0

    outside = ("/etc", "/usr", "/opt/coserve", "/srv", "/srv/images/line")
    assert [each for each in outside if is_writable(each)] == ["/srv/images/line"]
    assert is_writable("/var/lib/coserve")
    assert enter("ls", "-A", "/root", "/home", "/tmp").stdout.split() == ["/home:", "/root:", "/tmp:"]
    cat = (f"--setuid={user}", f"--setgid={group}", "cat")
    assert enter(*cat, "/run/credentials/coserve.service/mqtt.password").stdout == "from the factory\n"
    assert "Permission denied" in enter(*cat, "/etc/coserve/mqtt.password").stderr


@pytest.mark.slow
def test_reload_keeps_the_agent_serving(running):
    before = running.state("coserve")
    running.systemctl("reload", "coserve")
    log = running.path("var/log/coserve.log")
    until(lambda: "reloaded applied=True" in log.read_text(), lambda: running.logs)
    after = running.wait_until("coserve", ActiveState="active", SubState="running")
    assert (after["MainPID"], after["NRestarts"]) == (before["MainPID"], before["NRestarts"])
    running.drop("B1_c1_R1.png")
    running.wait_for_verdict("B1_c1_R1.png")


def test_agent_is_started_again_after_kill_9(running):
    before = running.state("coserve")
    running.systemctl("kill", "--signal=KILL", "--kill-whom=main", "coserve")
    restarts = str(int(before["NRestarts"]) + 1)
    after = running.wait_until("coserve", ActiveState="active", SubState="running", NRestarts=restarts)
    assert after["MainPID"] != before["MainPID"]
    assert running.ends("coserve")[-1] == "signal killed KILL"
    running.drop("B2_c0_R1.png")
    running.wait_for_verdict("B2_c0_R1.png")


def test_hanging_scheduler_is_ended_by_the_watchdog_and_the_next_start_judges_its_images(running):
    before = running.state("coserve")
    running.path("var/lib/coserve/deadlock").touch()
    running.drop("B3_c0_R1.png")
    restarts = str(int(before["NRestarts"]) + 1)
    running.wait_until("coserve", ActiveState="active", SubState="running", NRestarts=restarts)
    assert running.ends("coserve")[-1].startswith("watchdog ")
    running.wait_for_verdict("B3_c0_R1.png")


def test_slow_disk_at_the_start_is_waited_for(system):
    """The start takes longer than TimeoutStartSec=, and says that it is on its way."""
    state = system.wait_until("coserve-slow", ActiveState="active", SubState="running")
    took_s = (int(state["ActiveEnterTimestampMonotonic"]) - int(state["InactiveExitTimestampMonotonic"])) / 1e6
    assert took_s > SLOW_START_S
    assert (state["NRestarts"], state["TimeoutStartUSec"]) == ("0", f"{SLOW_START_S}s")


@pytest.mark.slow
def test_agent_stops_cleanly(running):
    running.systemctl("stop", "coserve")
    state = running.wait_until("coserve", ActiveState="inactive")
    assert (state["Result"], state["ExecMainStatus"]) == ("success", "0")
    assert running.ends("coserve")[-1] == "success exited 0"
