"""`make size`: what counts as a line of code, and that a room above its budget fails."""

import runpy
from pathlib import Path

SIZE = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "size.py"))
CODE = '"""Of the module,\n\nin three lines."""\n\nx = 1  # one\n\n\n'
CODE += 'def f():\n    """Of f."""\n    return """\n\n"""\n'


def test_a_room_above_its_budget_fails(tmp_path, capsys):
    files = {"tests/test_a.py": CODE, "mlx_qlayers/ops/a.py": "x = 1\n", "mlx_qlayers/b.py": ""}
    files["mlx_qlayers/metal/a/a.metal"] = "// a\n\nkernel\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    budgets = tmp_path / "budget.toml"
    enough = '[code]\ntests = 4\nmlx_qlayers = 0\n"mlx_qlayers/ops" = 1\n'
    enough += '"mlx_qlayers/metal, kernels" = 2\n[lines]\nmlx_qlayers = 1\ntests = 12\n'
    budgets.write_text(enough)
    assert SIZE["count"](tmp_path / "tests" / "test_a.py") == (4, 4, 4)
    assert SIZE["main"](tmp_path, budgets) == 0
    for line in ("tests = 4", "mlx_qlayers = 1", "tests = 12", '"mlx_qlayers/metal, kernels" = 2'):
        name, _, most = line.partition(" = ")
        budgets.write_text(enough.replace(line, f"{name} = {int(most) - 1}"))
        capsys.readouterr()
        assert SIZE["main"](tmp_path, budgets) == 1
        assert name.strip('"') in capsys.readouterr().out.splitlines()[-1]
    budgets.write_text(enough.replace('"mlx_qlayers/ops" = 1\n', ""))
    assert SIZE["main"](tmp_path, budgets) == 1  # a room without a budget
