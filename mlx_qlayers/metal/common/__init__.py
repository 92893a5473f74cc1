"""Code that several families share: matrix fragments, tiles, row sums, the health buffer."""
