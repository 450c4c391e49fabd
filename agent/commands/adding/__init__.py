"""Adding a model to a line: its facts, its trainer's answers, its files."""
