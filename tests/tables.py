"""Prints tables at the end of a test run.

A test adds a row with ``record_property("table: <title>", [cell, ...])``, in any process.
"""

import pytest

_PREFIX = "table: "
_WIDEST = 150


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables: dict[str, list[list[str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, row in report.user_properties:
                if name.startswith(_PREFIX):
                    tables.setdefault(name.removeprefix(_PREFIX), []).append([*map(str, row)])
    for title, rows in sorted(tables.items()):
        terminalreporter.section(f"{title} ({len(rows)})", sep="-")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in sorted(rows):
            line = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            terminalreporter.write_line(line[:_WIDEST])
