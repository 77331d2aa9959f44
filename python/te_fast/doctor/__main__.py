"""``python -m te_fast.doctor``."""

import sys

from te_fast.doctor import main

sys.exit(main())
