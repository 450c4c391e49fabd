"""Experts: their nouns, their weights on disk, and how they run. Knows no queue.

Guarantees: ONNX Runtime sends no telemetry, which its official builds do from 1.29 on, seconds after their import. It
obeys this variable alone, and only if it is set before; its function for this sends an event first.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
