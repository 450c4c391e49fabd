"""Two small language models on one backbone: text made up, models trained, asked through the agent, and a report."""
