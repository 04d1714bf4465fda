"""The dashboard in real JupyterLab, driven through Chromium."""
