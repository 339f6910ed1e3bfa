"""The Envoy side: the ext_proc protocol, its server and its replies."""
