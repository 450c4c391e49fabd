"""Probability that a request uses each expert (CoServe, section 4.5)."""
