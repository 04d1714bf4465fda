"""IPython and the notebook: loading, magics, the events of cells, the Python functions."""
