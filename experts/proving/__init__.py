"""Proof of models: known answers, their comparison with an expert's own, the search for inputs that explain them."""
