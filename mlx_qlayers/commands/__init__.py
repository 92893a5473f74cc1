"""The commands of ``mlx-qlayers``, one module each: ``add_arguments(parser)`` and ``run(args)``."""
