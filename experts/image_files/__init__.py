"""Files of images: whether they are whole, how far a damaged one goes, and what more than 8 bits mean."""
