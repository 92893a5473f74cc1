"""Gives each Python that finds this an Apple GPU; see ``tests/apple_gpu.py``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import apple_gpu

apple_gpu.install()
