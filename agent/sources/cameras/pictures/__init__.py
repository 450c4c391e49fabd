"""What pictures can be read from: one contract, and a file for each kind of camera that keeps it."""
