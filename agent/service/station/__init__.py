"""The station of a running line: what `/api` shows of it, and what a person decides there."""
