"""``python -m te_fast.convert``."""

import sys

from te_fast.convert import main

sys.exit(main())
