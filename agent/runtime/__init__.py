"""Execution of the Engine's effects with threads, transfers and devices, answered with events."""
