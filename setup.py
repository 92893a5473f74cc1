"""The rest is in pyproject.toml; this puts the shipped model and the benchmarks into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODEL = Path("models") / "tales-qwen2"
# What the command bench runs.
SCRIPTS = ("bench_*.py", "common.py", "decoding.py", "plot.py", "suite.py")


class BuildWithModel(build_py):
    """Copies the model and the benchmarks to where an installed package looks for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install finds it in the repository
            target = Path(self.build_lib) / "mlx_qlayers" / "_models" / MODEL.name
            shutil.copytree(MODEL, target, dirs_exist_ok=True)
            target = Path(self.build_lib) / "mlx_qlayers" / "_benchmarks"
            target.mkdir(parents=True, exist_ok=True)
            for script in (path for name in SCRIPTS for path in Path("benchmarks").glob(name)):
                shutil.copy(script, target)


setup(cmdclass={"build_py": BuildWithModel})
