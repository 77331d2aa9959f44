"""Below all layers: the native module, regions, delayed scaling, recomputation, and what the machine can run.

The native module is imported here and nowhere else. No ``nn.Module`` is defined in this folder.
"""

from te_fast import _native as native

__all__ = ["native"]
