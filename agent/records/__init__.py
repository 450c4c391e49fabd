"""What is kept: verdicts, boards, and how often an image was tried."""
