"""Reads trainers' files without running anything of them: pickles as data, their weights, and the facts in them."""
