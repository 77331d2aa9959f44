"""te_fast under the name of Transformer Engine's extension: this is not NVIDIA's module.

The name is te_fast's own module object, so that its objects are the same under either name.
"""

from __future__ import annotations

import sys

from te_fast import tex

sys.modules[__name__] = tex
