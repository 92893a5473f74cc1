"""The report of a conversion."""

import json

from mlx_qlayers import ConversionReport
from mlx_qlayers.conversion.report import FUSED, LEFT, SWAPPED, FusionReport, ModuleReport

ROWS = (
    ModuleReport("model.embed", "embedding", (320, 128), 64, 4, "affine", SWAPPED),
    *(
        ModuleReport(f"model.layers.{i}.mlp.up", "linear", (192, 128), 64, 4, "affine", SWAPPED)
        for i in (0, 1, 2, 10)
    ),
    ModuleReport("model.layers.0.attn", "attention", None, None, None, None, LEFT, "because"),
)
REPORT = ConversionReport(ROWS, ("lm_head",))


def test_prints_one_aligned_row_a_module():
    header, *rows, total, unmatched = str(REPORT).splitlines()
    assert len(rows) == len(ROWS)
    column = header.index("kind")
    assert all(row[column - 2 : column] == "  " and row[column] != " " for row in rows)
    assert "320x128" in rows[0] and rows[-1].endswith("because")
    assert total == "5 swapped, 1 left"
    assert unmatched.endswith("lm_head")


def test_summary_folds_layers():
    lines = REPORT.summary().splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [
        "model.embed",
        "model.layers.0-2,10.mlp.up",
        "model.layers.0.attn",
    ]


def test_to_dict_is_json():
    loaded = json.loads(json.dumps(REPORT.to_dict()))
    assert loaded["counts"] == REPORT.counts and len(loaded["rows"]) == len(ROWS)
    assert loaded["rows"][0]["group_size"] == 64 and loaded["unmatched"] == ["lm_head"]


def test_what_is_said_of_steps():
    row = FusionReport("", "step", FUSED, "a graph of 257 operations as one of 94")
    report = ConversionReport(ROWS, fusions=(row,))
    for text in (str(report), report.summary()):
        assert "step  fused   a graph of 257 operations as one of 94\n" in text
    assert "decodes by graphs" in report.brief()
    assert report.to_dict()["fusions"][0]["reason"] == row.reason
