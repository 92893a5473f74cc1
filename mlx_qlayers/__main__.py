"""``python -m mlx_qlayers``, the same as the ``mlx-qlayers`` command."""

import sys

from .cli import main

sys.exit(main())
