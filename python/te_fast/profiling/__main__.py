"""``python -m te_fast.profiling``."""

import sys

from te_fast.profiling import main

sys.exit(main())
