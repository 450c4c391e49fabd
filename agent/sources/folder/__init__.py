"""Watched folder: its files are detected as complete, claimed, read and put away."""
