"""`coserve bench compute`: what a batch costs in each form, beside its peers and what arithmetic alone would take."""
