"""Answers to callers of a running line: verdicts, status, explanations."""
