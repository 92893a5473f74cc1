"""Training beside the layers: a loss without logits."""
