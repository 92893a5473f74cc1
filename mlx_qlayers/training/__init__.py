"""What training needs beside the layers: a loss without logits."""
