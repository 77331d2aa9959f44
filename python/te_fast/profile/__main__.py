"""``python -m te_fast.profile``."""

import sys

from te_fast.profile import main

sys.exit(main())
