"""Work on a whole line file: checked as `serve` reads it, an expert promoted in it."""
