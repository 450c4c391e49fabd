"""`coserve serve`: connects intake, runtime and records; start, drain, stop."""
