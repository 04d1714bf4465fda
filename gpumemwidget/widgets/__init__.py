"""The dashboard and the other live widgets: their kernel side, and JavaScript in ``static/``."""
