"""IPython and Jupyter: the extension, the cell events, the magics, the dashboard."""
