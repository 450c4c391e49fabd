"""Runs an Engine under virtual time, and bounds what any schedule could reach."""
