"""The command info: versions, device, backends, and a report that changes nothing."""

import re

from mlx_qlayers.cli import main


def test_info_names_versions_device_and_backends(tiny_model, capsys):
    assert main(["info", "--model", str(tiny_model)]) == 0
    out, err = capsys.readouterr()
    for name in (
        "python",
        "mlx",
        "mlx-lm",
        "device",
        "memory",
        "backend",
        "  metal",
        "  reference",
    ):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE), name
    assert "qwen2" in out and err == ""
