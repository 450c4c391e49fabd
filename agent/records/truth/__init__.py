"""Answers compared: an expert's with its shadow's, and with people's verdicts; drift of its false calls."""
