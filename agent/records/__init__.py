"""What is kept: verdicts, boards."""
