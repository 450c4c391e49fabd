"""`coserve serve`: ties intake, runtime and records together; start, drain, stop."""
