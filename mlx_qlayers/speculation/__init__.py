"""Speculative decoding: guesses, their verification in one step, and what caches hold after it."""
