"""What the box has: processors, memories and what is taken of them."""
