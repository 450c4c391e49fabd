"""Description of a model's file: architecture, labels and input as far as the file tells, each with its evidence."""
