"""What a model's file is: its architecture, labels and input, as far as the file tells, each with where it stands."""
