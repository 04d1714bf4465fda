"""How Sphinx builds the documents: ``sphinx-build -E -W -b html docs build/docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from gpumemwidget import __version__

project = "gpumemwidget"
author = "the authors of gpumemwidget"
copyright = f"%Y, {author}"  # noqa: A001 - Sphinx's own name
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "magics",
    "notebook_cell",
    "record_types",
]
# The figures stand in the page on prediction.
exclude_patterns = ["extensions", "prediction_figures.md"]
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The fields of a record are described once, in its list of attributes.
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"gpumemwidget {release}"
html_static_path = ["static"]
html_css_files = ["docs.css"]
# Signatures of more than one option stand one option to a line.
maximum_signature_line_length = 72
