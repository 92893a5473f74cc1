"""README.md and docs/: numbers are those of the result files, links and commands lead somewhere."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import readme
import stored
from architecture_table import ARCHITECTURES

from mlx_qlayers.cli import main

ROOT = Path(__file__).parents[1]
TEXT = readme.README.read_text()
PAGES = [
    readme.README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "mlx_qlayers").rglob("*.md")),
]
PART = re.compile(r"<!-- (\w+ ?\w*) -->\n(.*?)<!-- end -->", re.DOTALL)
PARTS = dict(PART.findall(readme.BENCHMARKS.read_text()))
MEASURED = {
    stem: block
    for name, block in PARTS.items()
    if (stem := name.removeprefix("results ")) != name and "Not measured yet" not in block
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")

STALE = "kernels have changed since"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("room", ["mlx_qlayers", "benchmarks", "examples", "notebooks", "tests"])
def test_no_sentence_begins_with_a_relative_clause(room):
    """Docstrings, comments and pages have a subject and a verb, as MLX's and PyTorch's do."""
    files = [path for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".ipynb")]
    found = [p for p in (*files, *PAGES) if re.search(r"\bWh(at|ose)\b", p.read_text("utf-8"))]
    assert files and not found


def rows(block: str) -> list[list[str]]:
    """The cells of a block's tables, without their heads."""
    tables = re.findall(r"^\|[-:| ]+\|\n((?:\|.*\n?)*)", block, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def assert_numbers_of_file(path: Path, shown: list[str], ratio: str) -> None:
    """Both numbers are in the file, up to rounding, and the ratio is theirs."""
    numbers = [float(number) for number in NUMBER.findall(path.read_text())]
    numbers += [1e3 * number for number in numbers]  # milliseconds shown as microseconds
    values = [float(cell.replace(",", "")) for cell in shown]
    for cell, value in zip(shown, values, strict=True):
        half_step = 0.5 * 10.0 ** -len(cell.partition(".")[2])
        assert any(abs(n - value) <= half_step * 1.001 for n in numbers), cell
    times = float(ratio.rstrip("x").replace(",", ""))
    error = min(abs(times * b / a - 1) for a, b in (values, values[::-1]))
    assert error < 0.03, (shown, ratio)


@pytest.mark.parametrize("page", readme.pages(), ids=lambda page: page.name)
def test_parts_are_those_of_the_files(page):
    text = page.read_text()
    assert readme.filled(text, readme.pages()[page]) == text, "run python benchmarks/readme.py"
    assert PART.findall(text)


def test_every_table_has_a_place():
    assert PARTS.keys() == readme.pages()[readme.BENCHMARKS].keys()
    assert {f"results {table.stem}" for table in readme.TABLES} < PARTS.keys()
    assert {"generate", "quantized_matmul", "grid_sample"} <= MEASURED.keys()
    assert len(rows(PART.search(TEXT)[2])) == len(readme.SUMMARY)  # type: ignore[index]


@pytest.mark.parametrize("stem", MEASURED)
def test_every_number_is_in_the_named_file(stem):
    """Without the code that wrote the table."""
    block = MEASURED[stem]
    (link,) = set(LINK.findall(block))
    path = readme.BENCHMARKS.parent / link
    assert path.stem == stem
    for day in re.findall(r"\d{4}-\d\d-\d\d", block):
        assert day in path.read_text()
    for _, *shown, ratio in rows(block):
        assert_numbers_of_file(path, shown, ratio)


def test_the_numbers_of_the_summary_are_in_the_files():
    for _, machine, script, _, *shown, ratio in rows(PART.search(TEXT)[2]):  # type: ignore[index]
        assert (ROOT / "benchmarks" / script.strip("`")).exists()
        (link,) = LINK.findall(machine)
        assert_numbers_of_file(ROOT / link, shown, ratio)


@pytest.mark.parametrize("page", readme.pages(), ids=lambda page: page.name)
def test_prose_about_measurements_has_no_number_of_its_own(page):
    prose = PART.sub("", page.read_text())
    if page == readme.README:
        prose = prose.partition("## Results")[2]
    if page == readme.MODELS:
        prose = prose.partition("The cost is ")[2].partition("## ")[0]
    if page == readme.SERVING:  # above that are sizes, which nobody measured
        prose = prose.partition("## Costs")[2]
    assert not re.findall(r"\d\.\d|\d ?%|\d(?:x| times)\b", prose)


@pytest.mark.parametrize(
    "found",
    stored.stored().values(),
    ids=lambda found: f"{found.name} {'is stale since' if found.stale else 'is of'} {found.commit}",
)
def test_the_pages_say_which_results_are_stale(found):
    """The names of these tests are the list of the stale results."""
    assert re.fullmatch("[0-9a-f]{7,8}(-dirty)?", found.commit), "of which commit is not said"
    lines = [line for page in readme.pages() for line in page.read_text().splitlines()]
    about = [line for line in lines if f"results/{found.name}.csv)" in line]
    says = [r"\*" in line or STALE in line for line in about if found.commit in line]
    assert says == [found.stale] * len(says), "run python benchmarks/readme.py"
    assert says, "no page says its commit"


def test_a_result_is_stale_once_a_kernel_that_it_timed_is_another(tmp_path):
    to, ignore = tmp_path / "mlx_qlayers" / "metal", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mlx_qlayers" / "metal", to, ignore=ignore)
    before = stored.kernels_hash("quantized_few", tmp_path)
    assert before == stored.kernels_hash("quantized_few") != stored.kernels_hash("linalg")
    metal = tmp_path / "mlx_qlayers" / "metal"
    for path, changes in (
        (metal / "linalg" / "linalg.metal", False),
        (metal / "quantized_matmul" / "qmv.metal", True),
        (metal / "common" / "fragment.metal", True),  # included
    ):
        text = path.read_text()
        path.write_text(f"// A comment.\n{text}")
        assert stored.kernels_hash("quantized_few", tmp_path) == before
        path.write_text(f"{text}\nconstant int added = 1;\n")
        assert (stored.kernels_hash("quantized_few", tmp_path) != before) == changes
        path.write_text(text)
    assert stored.kernels_hash("distributed_plan") == "none"


def test_a_table_whose_file_is_missing_says_so():
    absent = readme.Table("absent", "absent.py", readme.MS, {})
    assert str(absent) == "Not measured yet: `python benchmarks/bench_absent.py` prints this table."
    with pytest.raises(ValueError, match="one place for results absent"):
        readme.filled(TEXT, {"results absent": str(absent)})


def test_every_stored_result_and_document_is_on_a_page():
    links = (link for page in PAGES for link in LINK.findall(page.read_text()))
    linked = {Path(link.partition("#")[0]).name for link in links}
    folders = ROOT / "benchmarks" / "results", ROOT / "docs"
    assert {path.name for folder in folders for path in folder.rglob("*.*")} <= linked


@every_page
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(page.read_text()):
        if not link.startswith("http"):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            if heading:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
                assert heading in slugs, link


def test_excerpts_are_in_the_files_that_they_name():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```(?:py|metal)\n(?:#|//) (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```py\n") + text.count("```metal\n") > 2
    for name, block in blocks:
        source = (ROOT / name).read_text()
        for part in block.split("...\n"):
            assert part.rstrip() in source, part


def test_packages_and_files_that_are_named_exist():
    design = (ROOT / "docs" / "design.md").read_text()
    named = re.findall(r"^\| ((?:`[\w./]+`(?:, )?)+) \|", design, re.MULTILINE)
    names = [name for cell in named for name in re.findall(r"`([\w./]+)`", cell)]
    assert len(names) > 10
    assert not [name for name in names if not (ROOT / name).exists()]


@every_page
def test_files_of_file_tables_exist(page):
    tables = re.findall(r"^\| file \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    cells = re.findall(r"^\| ([^|]+) \|", "".join(tables), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert not [name for name in names if not (page.parent / name).exists()]


@every_page
def test_commands_exist(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script, options in set(re.findall(r"`python ([\w/]+\.py)([^`]*)`", text)):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--([\w-]+)", options):
            assert option in source, f"{script} --{option}"


def test_subcommands_take_the_options_that_are_shown(capsys):
    text = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    shown = set(re.findall(r"(?:^|`)mlx-qlayers (\w+)([^`\n]*)", text, re.MULTILINE))
    assert len({command for command, _ in shown}) >= 8
    for command, rest in shown:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(option in text for option in re.findall(r"--[\w-]+", rest)), command


def test_the_number_of_architectures_is_that_of_the_tests():
    assert f"{len(ARCHITECTURES)} mlx-lm architectures" in TEXT


def test_the_readme_is_short_and_no_sentence_stands_twice():
    assert len(TEXT.splitlines()) <= 160
    prose = [re.sub(r"```.*?```", "", PART.sub("", p.read_text()), flags=re.DOTALL) for p in PAGES]
    sentences = (" ".join(s.split()) for text in prose for s in re.split(r"[.:|]\s|\n\n", text))
    counts = Counter(s for s in sentences if len(s.split()) > 6)
    assert not [sentence for sentence, count in counts.items() if count > 1]
