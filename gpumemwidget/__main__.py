"""``python -m gpumemwidget``: see ``gpumemwidget.remote.telling.run``."""

from __future__ import annotations

import sys

from gpumemwidget.remote.telling.run import main

if __name__ == "__main__":
    sys.exit(main())
