"""Clients that ask an agent what its station's page asks: `python -m proof.parts.page_clients HOST:PORT COUNT`.

Each has one connection. Once a second a client asks for the state, unless unchanged; then for the thumbnail of each
case it has not seen, and for the newest case with its image. They end with their standard input, and print the number
of answers by kind as JSON. Only the standard library is loaded: a client is no load by itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection

EVERY_S = 1.0


class PageClient:
    def __init__(self, address: str) -> None:
        self._connection = HTTPConnection(address, timeout=60)
        self._etag = ""
        self._seen = set[int]()
        self.answers = Counter[str]()

    def run(self, is_over: threading.Event, first_after_s: float) -> None:
        due_s = time.monotonic() + first_after_s
        while not is_over.wait(max(due_s - time.monotonic(), 0.0)):
            due_s = max(due_s + EVERY_S, time.monotonic())
            self._look()

    def _look(self) -> None:
        state = self._asked("state", "/api/state", {"if-none-match": self._etag} if self._etag else {})
        cases = [case["seq"] for case in json.loads(state)["state"]["cases"]] if state else []
        for seq in (unseen := [seq for seq in cases if seq not in self._seen]):
            self._asked("thumbnail", f"/api/results/{seq}/thumbnail")
        if unseen and unseen[0] == cases[0]:
            self._asked("result", f"/api/results/{cases[0]}")
            self._asked("image", f"/api/results/{cases[0]}/image?width=1280")
        self._seen.update(unseen)

    def _asked(self, kind: str, path: str, headers: dict[str, str] | None = None) -> bytes:
        self._connection.request("GET", path, headers=headers or {})
        answer = self._connection.getresponse()
        self.answers[f"{kind} {answer.status}"] += 1
        if kind == "state":
            self._etag = answer.getheader("etag", "")
        return answer.read()


def main(address: str, count: int) -> None:
    is_over, clients = threading.Event(), [PageClient(address) for _ in range(count)]
    looking = [(client, (is_over, EVERY_S * number / count)) for number, client in enumerate(clients)]
    threads = [threading.Thread(target=client.run, args=given, daemon=True) for client, given in looking]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(sum((client.answers for client in clients), Counter[str]())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
