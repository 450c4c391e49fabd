"""The SQLite file that the offline phase writes and the agent reads, and nothing else."""
