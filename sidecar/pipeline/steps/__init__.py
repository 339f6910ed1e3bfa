"""One module per pipeline step."""
