"""What a line is asked to do: traces, generated lines, sample images."""
