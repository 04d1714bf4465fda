"""Records become text, HTML and figures. Nothing here computes or asks hardware."""
