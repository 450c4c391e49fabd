"""What goes wrong in the agent: its errors, and the pauses before what failed is tried again."""
