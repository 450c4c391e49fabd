"""People's verdicts as ground truth: figures of experts, and drift of their false calls."""
