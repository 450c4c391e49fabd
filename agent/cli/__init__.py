"""The agent's commands, a family in each module; which there are stands in ``app``."""
