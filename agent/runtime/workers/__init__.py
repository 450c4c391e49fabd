"""Workers in other processes: what crosses, the process that hosts one, and the agent's end of it."""
