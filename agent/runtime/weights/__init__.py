"""Weights of experts: slots of a memory, loads into them, skeletons bound to them."""
