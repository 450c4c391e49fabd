"""What trainers save, read without running anything of it: pickles as data, the weights in them, and what they tell."""
