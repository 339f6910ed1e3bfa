"""`epd-sidecar envoy-config`: Envoy's side of a deployment, written from the sidecar's own configuration.

Needs the extra `envoy-config`; nothing of it is imported where requests are served.
"""
