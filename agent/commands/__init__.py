"""One-off commands beside a running agent, and progress of long work."""
