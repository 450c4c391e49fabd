"""Clients that ask an agent what its station's page asks: `python -m proof.parts.page_clients HOST:PORT COUNT`.

Each has one connection. Once a second a client asks for the state, unless unchanged; then for the newest case with its
image and its board, if it is new and the case before has been shown for HELD_S, and for the thumbnails of cases that
have stayed since the answer before. They end with their standard input, and print the number of answers by kind as
JSON. Only the standard library is loaded: a client is no load by itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from urllib.parse import urlencode

EVERY_S, HELD_S = 1.0, 3.0  # as station.js


class PageClient:
    def __init__(self, address: str) -> None:
        self._connection = HTTPConnection(address, timeout=60)
        self._etag = ""
        self._cases: list[int] = []
        self._held, self._held_s = 0, -HELD_S
        self._seen = set[int]()  # thumbnails
        self.answers = Counter[str]()

    def run(self, is_over: threading.Event, first_after_s: float) -> None:
        due_s = time.monotonic() + first_after_s
        while not is_over.wait(max(due_s - time.monotonic(), 0.0)):
            due_s = max(due_s + EVERY_S, time.monotonic())
            self._look()

    def _look(self) -> None:
        state = self._asked("state", "/api/state", {"if-none-match": self._etag} if self._etag else {})
        before, cases = self._cases, json.loads(state)["state"]["cases"] if state else None
        if cases is not None:
            self._cases = [case["seq"] for case in cases]
        if cases and cases[0]["seq"] != self._held and time.monotonic() - self._held_s >= HELD_S:
            self._held, self._held_s = cases[0]["seq"], time.monotonic()
            self._asked("result", f"/api/results/{cases[0]['seq']}")
            self._asked("image", f"/api/results/{cases[0]['seq']}/image?width=1280")
            board = {"serial": cases[0]["board"], "board_type": cases[0]["board_type"], "limit": 1}
            if board["serial"] is not None:
                self._asked("board", f"/api/boards?{urlencode({key: each for key, each in board.items() if each})}")
        for seq in [seq for seq in self._cases if seq in before and seq not in self._seen]:
            self._asked("thumbnail", f"/api/results/{seq}/thumbnail")
            self._seen.add(seq)

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
