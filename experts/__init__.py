"""What an expert is, how its weights lie on disk, how it runs. Knows no queue."""
