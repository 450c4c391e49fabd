"""From a line file, a box and its device profile to the arguments of an Engine, and to an agent."""
