"""README.md: its numbers are those of the result files, its links and commands lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from architecture_table import ARCHITECTURES

from mlx_qlayers.cli import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"<!-- results (\w+) -->(.*?)<!-- end -->", re.DOTALL)
BLOCKS = dict(BLOCK.findall(TEXT))
MEASURED = {stem: block for stem, block in BLOCKS.items() if "Not measured yet" not in block}
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def rows(block: str) -> list[list[str]]:
    """The cells of a block's table, without its heads."""
    lines = [line for line in block.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def half_step(cell: str) -> float:
    """What a number may have lost when it was rounded to the digits that are shown."""
    return 0.5 * 10.0 ** -len(cell.partition(".")[2])


def test_tables_are_those_of_the_files() -> None:
    assert readme.updated(TEXT) == TEXT, "run python benchmarks/readme.py"


def test_every_table_has_a_place() -> None:
    assert list(BLOCKS) == [table.stem for table in readme.TABLES]
    assert {"generate", "quantized_matmul", "grid_sample"} <= MEASURED.keys()


@pytest.mark.parametrize("stem", MEASURED)
def test_every_number_is_in_the_named_file(stem: str) -> None:
    """Without the code that wrote the table."""
    block = MEASURED[stem]
    (link,) = LINK.findall(block)
    assert Path(link).stem == stem
    text = (ROOT / link).read_text()
    stored = [float(number) for number in NUMBER.findall(text)]
    stored += [1e3 * number for number in stored]  # milliseconds shown as microseconds
    assert re.search(r"\d{4}-\d\d-\d\d", block).group() in text  # type: ignore[union-attr]
    for _, *shown, ratio in rows(block):
        for cell in (cell.replace(",", "") for cell in shown):
            assert any(abs(n - float(cell)) <= half_step(cell) * 1.001 for n in stored), cell
        a, b = (float(cell.replace(",", "")) for cell in shown)
        times = float(ratio.rstrip("x").replace(",", ""))
        assert min(abs(times * b / a - 1), abs(times * a / b - 1)) < 0.03, (shown, ratio)


def test_prose_about_measurements_has_no_number_of_its_own() -> None:
    measured = TEXT.partition("## Measured")[2].partition("## Design")[0]
    prose = re.sub(r"<!-- (\w+ ?\w*) -->.*?<!-- end -->", "", measured, flags=re.DOTALL)
    assert not re.findall(r"\d\.\d|\d ?%|\d(?:x| times)\b", prose)


def test_a_table_whose_file_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = readme.Table("absent", "benchmarks/bench_absent.py", readme.MS, [])
    assert str(absent) == "Not measured yet: `python benchmarks/bench_absent.py` prints this table."
    monkeypatch.setattr(readme, "TABLES", [*readme.TABLES, absent])
    with pytest.raises(ValueError, match="one place for results absent"):
        readme.updated(TEXT)


@pytest.mark.parametrize(
    "name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mlx_qlayers/runtime/README.md"]
)
def test_links_lead_to_files(name: str) -> None:
    path = ROOT / name
    links = [link for link in LINK.findall(path.read_text()) if not link.startswith("http")]
    assert not [link for link in links if not (path.parent / link.partition("#")[0]).exists()]


def test_rooms_and_files_that_are_named_exist() -> None:
    design = TEXT.partition("## Design")[2].partition("## Pitfalls")[0]
    named = re.findall(r"^\| ((?:`[\w./]+`(?:, )?)+) \|", design, re.MULTILINE)
    names = [name for cell in named for name in re.findall(r"`([\w./]+)`", cell)]
    assert len(names) > 10
    package = ROOT / "mlx_qlayers"
    assert not [n for n in names if not ((ROOT / n).exists() or (package / n).exists())]


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script, options in set(re.findall(r"`python ([\w/]+\.py)([^`]*)`", TEXT)):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--([\w-]+)", options):
            assert option in source, f"{script} --{option}"


def test_subcommands_take_the_options_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = set(re.findall(r"^mlx-qlayers (\w+)(.*)$", TEXT, re.MULTILINE))
    assert len(shown) >= 8
    for command, rest in shown:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(option in text for option in re.findall(r"--[\w-]+", rest)), command


def test_the_number_of_architectures_is_that_of_the_tests() -> None:
    assert f"{len(ARCHITECTURES)} are tested" in TEXT
