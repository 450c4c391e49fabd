"""Retention of images and rows: archived, ranked, removed."""
