"""Demand on a line: traces, generated lines, sample images."""
