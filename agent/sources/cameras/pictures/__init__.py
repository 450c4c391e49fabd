"""Readers of pictures: one contract, and one module for each kind of camera."""
