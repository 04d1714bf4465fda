"""A loaded extension, which magics, buttons and Python functions call."""
