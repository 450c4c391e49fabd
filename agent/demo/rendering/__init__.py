"""Circuit boards drawn from scratch: parts, products, defects, and the picture of a judged board."""
