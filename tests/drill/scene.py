"""A line under fire: fake experts behind a folder and a socket, images whose verdict is known, and the final account.

The account: what was dropped or accepted is judged exactly once, with the verdict that its image deserves; what a
caller was told is what is stored; each file lies where its verdict says.
"""

import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress

import grpc

from agent.doors.grpc.client import AgentClient
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from experts.errors import CoServeError
from experts.expert import Verdict
from tests.agent.service import fake_line
from tests.waiting import until

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40), (40, 200, 200), (200, 40, 200)]
PATIENCE_S = 90.0
EXPERTS = 4


def is_full():
    """Whether the drills run as `make drill`, or in their short form."""
    return os.environ.get("DRILL") == "full"


def picture(colour, size=8):
    return fake_line.picture(COLOURS[colour], (size, size))


class Scene(fake_line.FakeLine):
    """One line in a folder of its own, whose experts answer by an image's colour."""

    def __init__(self, folder, socket):
        super().__init__(folder)
        for number in range(EXPERTS):
            self.add_expert(number)
            self.fake(number, weight_bytes=2_000_000 + number, label=None, K_s=0.002)
        self.socket = f"unix:{socket}"
        self.log = folder / "agent.log"
        self.watch(poll_s=0.2)
        self.document |= {
            "boards": {},
            "memory": {"host": "16MiB", "workspace": "8MiB"},
            "api": {"grpc": [self.socket]},
        }
        self.dropped = {}  # file name -> colour
        self.accepted = {}  # key -> component, colour
        self.answered = {}  # key -> verdict
        self.refused = Counter()
        self._number = 0
        self.write()

    def drop_one(self, colour, content=None):
        self._number += 1
        name = f"B{self._number // EXPERTS}_c{self._number % EXPERTS}_R{self._number}.png"
        self.drop(name, picture(colour) if content is None else content)
        self.dropped[name] = colour

    def drop_many(self, count):
        for number in range(count):
            self.drop_one(number % len(COLOURS))

    def order(self, keys, timeout_s=10.0):
        """Send images over one stream: (key, component, colour) each; what comes back is remembered."""
        with grpc.insecure_channel(self.socket) as channel:
            stub = inspection_pb2_grpc.InspectionStub(channel)
            wanted = {key: (component, colour) for key, component, colour in keys}
            is_over = threading.Event()

            def orders():
                for key, component, colour in keys:
                    request = pb.InspectRequest(file=picture(colour), component=component, key=key)
                    yield pb.StreamOrder(id=key, order=request)
                is_over.wait(timeout_s)

            with suppress(grpc.RpcError):
                left = set(wanted)
                for answer in stub.InspectStream(orders(), timeout=timeout_s):
                    kind = answer.WhichOneof("answer")
                    if kind == "accepted":
                        self.accepted[answer.id] = wanted[answer.id]
                        continue
                    left.discard(answer.id)
                    if kind == "judged":
                        self.accepted[answer.id] = wanted[answer.id]
                        self.answered[answer.id] = pb.Verdict.Name(answer.judged.parts[0].verdict)
                    else:
                        self.refused[answer.refused.reason] += 1
                    if not left:
                        break
            is_over.set()

    def is_up(self):
        try:
            with AgentClient(self.socket) as client:
                client.status()
        except CoServeError:
            return False
        return True

    def is_finished(self):
        files = [path for path in self.inbox.iterdir() if path.is_file()]
        return not (files or self.shelf(".work") or self.unfinished)

    def account(self, expected=None):
        """Asserts that nothing is lost, doubled, or OK without evidence; the counts."""
        rows = self.rows
        images = Counter(row.subject.image for row in rows if not row.subject.key.startswith(("api/", "camera/")))
        keys = Counter(row.subject.key.removeprefix("api/") for row in rows if row.subject.key.startswith("api/"))
        lost = [name for name in self.dropped if images[name] == 0]
        lost += [key for key in self.accepted if keys[key] == 0]
        doubled = [name for name, count in (images + keys).items() if count > 1]
        assert not lost, f"lost: {lost[:5]} of {len(lost)}"
        assert not doubled, f"doubled: {doubled[:5]} of {len(doubled)}"
        stored = {row.subject.key.removeprefix("api/"): f"VERDICT_{row.verdict}" for row in rows}
        wrong = [key for key, said in self.answered.items() if stored[key] != said]
        assert not wrong, f"told otherwise than stored: {wrong[:5]}"
        self._check_evidence(rows, expected or {})
        self._check_files(rows)
        verdicts = Counter(str(row.verdict) for row in rows)
        return {"dropped": len(self.dropped), "accepted": len(self.accepted), "answered": len(self.answered),
                "stored": len(rows), "lost": 0, "doubled": 0, **verdicts, **self.refused}  # fmt: skip

    def _check_evidence(self, rows, expected):
        for row in rows:
            if row.verdict is not Verdict.UNKNOWN:
                assert row.experts, f"{row.subject.key} is {row.verdict} without an expert's word"
            colour = self.dropped.get(row.subject.image)
            if colour is None:
                colour = self.accepted.get(row.subject.key.removeprefix("api/"), (None, None))[1]
            wanted = expected.get((row.subject.component, colour))
            assert wanted is None or row.verdict in (wanted, Verdict.UNKNOWN), (
                f"{row.subject.key}: {row.verdict}, not {wanted}"
            )
            if wanted is not None and row.verdict is Verdict.UNKNOWN:  # which two kills met
                assert "ended the agent" in row.reason, f"{row.subject.key}: {row.reason}"

    def _check_files(self, rows):
        shelves = {Verdict.OK: "done", Verdict.NG: "ng", Verdict.UNKNOWN: "failed"}
        for row in rows:
            if row.subject.key.startswith(("api/", "camera/")):
                continue
            found = [path.relative_to(self.inbox).parts[0] for path in self.inbox.rglob(row.subject.image)]
            assert found == [shelves[row.verdict]], f"{row.subject.image} is {row.verdict}, and lies in {found}"


class Agents:
    """Agents of a scene, each a fork that takes a moment to start and can be killed at any."""

    def __init__(self, scene, forks):
        self._scene = scene
        self._forks = forks
        self.running = None

    def start(self):
        code = f"import logging\nlogging.basicConfig(level=logging.INFO)\n{fake_line.SERVED}"
        self.running = self._forks.start(code, self._scene.folder / "line.yaml", log=self._scene.log)

    def serve(self):
        """Start an agent, and wait until it answers."""
        self.start()
        until(self._scene.is_up)

    def finish(self):
        """Wait until all is judged, and stop without an error."""
        until(self._scene.is_up)
        until(self._scene.is_finished)
        assert self.stop() == 0

    def stop(self):
        """As systemd does; its exit code."""
        self.running.send_signal(signal.SIGTERM)
        return self.running.wait(PATIENCE_S).returncode


class Sender:
    """Keeps images coming by both ways until it is stopped, whether an agent is there or not."""

    def __init__(self, scene, seed):
        self._scene = scene
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._drop, self._order)]
        self._sent = 0

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _drop(self):
        while not self._stopping.wait(0.03):
            self._scene.drop_one(self._random.randrange(len(COLOURS)))

    def _order(self):
        while not self._stopping.wait(0.02):
            keys = []
            for _ in range(8):
                self._sent += 1
                colour = self._random.randrange(len(COLOURS))
                keys.append((f"k{self._sent}", f"c{self._sent % EXPERTS}", colour))
            self._scene.order(keys, timeout_s=5.0)
