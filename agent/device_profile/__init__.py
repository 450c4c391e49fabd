"""Device profile: the SQLite file that the offline phase writes and the agent reads."""
