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
            self.look()

    def look(self) -> None:
        body = self._asked("/api/state", {"if-none-match": self._etag} if self._etag else {})
        if not body:
            return
        cases = json.loads(body)["state"]["cases"]
        unseen = [case["seq"] for case in cases if case["seq"] not in self._seen]
        self._seen.update(unseen)
        for seq in unseen:
            self._asked(f"/api/results/{seq}/thumbnail")
        if cases and cases[0]["seq"] in unseen:
            self._asked(f"/api/results/{cases[0]['seq']}")
            self._asked(f"/api/results/{cases[0]['seq']}/image?width=1280")

    def _asked(self, path: str, headers: dict[str, str] | None = None) -> bytes:
        self._connection.request("GET", path, headers=headers or {})
        answer = self._connection.getresponse()
        self._etag = answer.getheader("etag", "") if path == "/api/state" else self._etag
        self.answers[
            f"{path.rpartition('/')[2].partition('?')[0] if path.count('/') != 3 else 'result'} {answer.status}"
        ] += 1
        return answer.read()


def main(address: str, count: int) -> None:
    is_over = threading.Event()
    clients = [PageClient(address) for _ in range(count)]
    threads = [
        threading.Thread(target=client.run, args=(is_over, EVERY_S * number / count), daemon=True)
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(sum((client.answers for client in clients), Counter[str]())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
