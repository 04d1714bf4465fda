"""Record any process, and gather what recorded processes tell.

``telling`` runs in the recorded process, ``gathering`` in the notebook; ``engines`` has the cluster
engines. ``messages``, ``files`` and ``process_log`` are what the two sides have in common.
"""
