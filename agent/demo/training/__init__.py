"""From crops to small experts: what they learn from, and how."""
