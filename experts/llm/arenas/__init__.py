"""Memory of keys and values of all models: one contract, and an arena for CPUs and for other devices."""
