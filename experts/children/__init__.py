"""Child processes: started, spoken to, bounded and ended in one way."""
