"""One-off commands beside a running agent, and how long work tells of itself."""
