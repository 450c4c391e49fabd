"""Images that are kept and how long: archived, ranked, swept away."""
