"""Sphinx configuration: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import reference  # noqa: E402 - of _ext
import te_fast  # noqa: E402

project = "te_fast"
author = "the te_fast authors"
copyright = "2026, the te_fast authors"
release = te_fast.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "outputs",
    "reference",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_theme = "furo"
html_title = f"te_fast {release}"
html_show_sourcelink = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autosummary_context = {"is_own": reference.is_own}
numpydoc_show_class_members = False
suppress_warnings = ["config.cache"]

reference.write(HERE / "reference" / "generated")
