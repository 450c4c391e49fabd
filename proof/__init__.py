"""Proof of what this project claims: contestants taking turns, the tasks of the paper, one report."""
