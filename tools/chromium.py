"""The browser that the tests drive: found where the machine has one, fetched where it has none.

``python -m tools.chromium`` prints its path. The system's own Chromium is preferred: it comes with
the libraries and fonts that it needs. On Debian and Ubuntu, as root, it is installed from there;
elsewhere Playwright's build is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["find_chromium", "install_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The path of a Chromium that can be started, or ``None``.

    ``GPUMEMWIDGET_CHROMIUM`` names one that stands elsewhere.
    """
    named = os.environ.get("GPUMEMWIDGET_CHROMIUM")
    if named:
        return named
    for name in _NAMES:
        found = shutil.which(name)
        if found:
            return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
    return bundled if Path(bundled).exists() else None


def install_chromium() -> None:
    """Install one by the means that this machine has.

    Raises:
        subprocess.CalledProcessError: the installation failed.
    """
    if shutil.which("apt-get") and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (
            ["update"],
            ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"],
        ):
            subprocess.run(["apt-get", *arguments], check=True, env=environment)
        return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


def main() -> int:
    """Print the browser's path, after installing one if need be."""
    if find_chromium() is None:
        print("no Chromium on this machine: installing one", flush=True)
        install_chromium()
    path = find_chromium()
    if path is None:
        print("Chromium was installed but is not found", file=sys.stderr)
        return 1
    print(f"Chromium: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
