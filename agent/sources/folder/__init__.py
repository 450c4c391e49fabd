"""A watched folder: which of its files are complete, claimed, read and put away."""
