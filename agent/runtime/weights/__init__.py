"""Weights of experts: slots of a memory, loads into slots, skeletons bound to slots."""
