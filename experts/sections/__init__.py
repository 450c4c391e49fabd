"""Experts and routes of a line file: typed sections, their rules, and the problems between them."""
