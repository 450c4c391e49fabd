"""From a line file, a box and its device profile to what an Engine is built with, and to an agent."""
