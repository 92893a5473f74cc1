"""The commands of ``mlx-qlayers``: modules with ``add_arguments(parser)`` and ``run(args)``."""
