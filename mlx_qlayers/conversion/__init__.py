"""The parts of convert_model: plan, patched classes, verification and report."""
