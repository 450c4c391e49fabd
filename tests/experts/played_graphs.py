"""CUDA graphs played on a CPU: a replay runs the captured work again, on the same tensors, into the same result."""

from experts.devices.graphs import DeviceGraphs

MOST_BYTES = 2**27


class PlayedRecorder:
    """As on CUDA, a capture computes nothing. ``error``: raised by each capture; ``taken_bytes``: by each of them."""

    def __init__(self, error=None, taken_bytes=0):
        self.pool_bytes = self.captures = self.replays = 0
        self._error, self._taken_bytes = error, taken_bytes

    def record(self, work):
        self.captures += 1
        result = work()
        if self._error is not None:
            raise self._error
        self.pool_bytes += self._taken_bytes
        result.fill_(float("nan"))

        def replay():
            self.replays += 1
            result.copy_(work())

        return result, replay


def played(**how):
    """Graphs of an executor, and their recorder."""
    recorder = PlayedRecorder(**how)
    return DeviceGraphs(recorder, MOST_BYTES), recorder
