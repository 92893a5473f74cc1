"""The example that the runtime's README starts with works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import mlx_qlayers.runtime

README = Path(mlx_qlayers.runtime.__file__).with_name("README.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_kernel_in_ten_minutes(tmp_path):
    (tmp_path / "rms_norm.metal").write_text(blocks("metal")[0])
    # The last block is the protocol of a backend.
    *example, _ = blocks("python")
    script = tmp_path / "rms_norm.py"
    script.write_text("\n".join(example))
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    launches, difference, traffic = run.stdout.strip().split("\n")
    assert "kernel='rms_norm', backend='host', grid=(32, 7, 1)" in launches
    assert float(re.findall(r"[\d.e-]+", difference)[0]) < 1e-6
    # The kernel reads each row twice.
    assert traffic == "2296 bytes read from device memory, 1148 in x"


def test_every_file_that_it_names_exists():
    rows = re.findall(r"^\| (`[^|]*`) \| ", README.read_text().split("## The files")[1], re.M)
    for name in re.findall(r"`([^`]+)`", " ".join(rows)):
        assert (README.parent / name).exists(), name
