"""What is done to a whole line file: checked as `serve` reads it, an expert promoted in it."""
