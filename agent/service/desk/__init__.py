"""Answers to callers of a running line: images judged, status, explanations."""
