"""The same Engine under virtual time, and what no schedule can beat."""
