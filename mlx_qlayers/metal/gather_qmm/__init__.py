"""Products with the quantized matrices that each row chooses."""
