"""`thundersyncrl bench learner` as a script."""

from __future__ import annotations

import sys

from thundersyncrl.bench.learner import main

if __name__ == "__main__":
    sys.exit(main())
