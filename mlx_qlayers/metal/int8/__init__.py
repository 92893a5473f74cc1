"""Products in 8-bit integers, with rows that are rounded as they come."""
