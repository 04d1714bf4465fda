"""``python -m gpumemwidget``: see ``gpumemwidget.remote.run``."""

from __future__ import annotations

import sys

from gpumemwidget.remote.run import main

if __name__ == "__main__":
    sys.exit(main())
