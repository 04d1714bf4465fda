"""Record any process, and show the recordings of many in one notebook.

``writer`` runs in the recorded process, ``reader`` in the notebook; ``engines`` has the cluster
engines. ``messages`` and ``process_log`` are what the two sides have in common.
"""
