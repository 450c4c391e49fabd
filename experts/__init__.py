"""Experts: their nouns, their weights on disk, and how they run. Knows no queue."""
