"""The gated delta rule of linear attention, token after token in one launch."""
