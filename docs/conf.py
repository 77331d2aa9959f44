"""Sphinx configuration: ``make docs``."""

from __future__ import annotations

import te_fast

project = "te_fast"
author = "the te_fast authors"
copyright = "2026, the te_fast authors"
release = te_fast.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"te_fast {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
suppress_warnings = ["myst.xref_missing"]
