"""Work with devices beside the CPU: copies to them and back, and graphs of what they run."""
