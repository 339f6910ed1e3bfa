"""Outgoing HTTP: the gateway, the render service and media servers."""
