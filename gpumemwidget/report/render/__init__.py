"""Documents of blocks, drawn as text and as HTML."""
