"""What several families share: matrix fragments, tiles, sums of rows, the health buffer."""
