"""Attention: forward, backward, decoding, and one step of decoding with its cache."""
