"""A trace on the real agent."""
