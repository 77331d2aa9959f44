"""The basic operations, by kind. Each may be called alone, as a group of one, which the fuser runs."""

from te_fast.ops import fuser as fuser
