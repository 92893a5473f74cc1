"""The rest is in pyproject.toml; this puts the model of models/ into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODEL = Path("models") / "tales-qwen2"


class BuildWithModel(build_py):
    """Copies the model to where an installed package looks for it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install finds it in the repository
            target = Path(self.build_lib) / "mlx_qlayers" / "_models" / MODEL.name
            shutil.copytree(MODEL, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithModel})
