"""Command line of the agent: a family of commands in each module, listed in ``app``."""
