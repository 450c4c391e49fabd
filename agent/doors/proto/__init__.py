"""The protocols on the wire: their sources, and the stubs that `make proto` makes of them."""
