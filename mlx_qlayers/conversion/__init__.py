"""What convert_model is made of: plan, patterns, patched classes, verification and report."""
