"""Find out which engine a client belongs to, and listen to its processes."""

from __future__ import annotations

import sys
from typing import Any

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.remote.reader.collector import Source


def open_cluster(client: object) -> Source:
    """Return the source of an engine's processes, which are recorded from now on.

    Args:
        client: an ``ipyparallel.Client``, a ``distributed.Client``; ``None`` for Ray.

    Raises:
        BadInputError: it is none of these, or Ray does not run.
    """
    library = type(client).__module__.partition(".")[0]
    known: Any = client
    if library == "ipyparallel":
        from gpumemwidget.remote.engines.ipyparallel import IpyparallelSource  # noqa: PLC0415 - an extra

        return IpyparallelSource(known)
    if library == "distributed":
        from gpumemwidget.remote.engines.dask import DaskSource  # noqa: PLC0415 - an extra

        return DaskSource(known)
    if client is None:
        if "ray" not in sys.modules:
            raise BadInputError(
                "name a client: watch_cluster(client) for ipyparallel and Dask; for Ray, call "
                "ray.init() before"
            )
        from gpumemwidget.remote.engines.ray import RaySource  # noqa: PLC0415 - an extra

        return RaySource()
    raise BadInputError(
        f"a client can't be of type {name_type(client)}: give an ipyparallel.Client, a "
        "distributed.Client, or nothing for Ray"
    )
