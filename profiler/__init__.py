"""The offline phase: measures the box and plans the line."""
