"""The parts below all layers: native module, regions, delayed scaling, recomputation, supported recipes.

Only this folder imports the native module. No ``nn.Module`` is defined in this folder.
"""

from te_fast import _native as native

__all__ = ["native"]
