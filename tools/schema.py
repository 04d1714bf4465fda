"""Write the schema of the records anew: ``python -m tools.schema``."""

from __future__ import annotations

from pathlib import Path

from gpumemwidget.model.encoding import make_schema

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "static" / "records.schema.json"
    path.write_text(make_schema(), encoding="utf-8")
