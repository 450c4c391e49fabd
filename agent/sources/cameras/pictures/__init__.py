"""Readers of pictures: one contract, and a file for each kind of camera."""
