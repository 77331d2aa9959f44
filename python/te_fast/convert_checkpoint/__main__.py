"""``python -m te_fast.convert_checkpoint``."""

import sys

from te_fast.convert_checkpoint import main

sys.exit(main())
