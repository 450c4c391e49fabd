"""Description of a model's file: its architecture, labels and input, each with its evidence."""
