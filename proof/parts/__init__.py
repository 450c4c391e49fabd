"""Benchmarks of one thing each: a decision, a load, a start."""
