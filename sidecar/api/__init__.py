"""The client side: one module per client API, behind one small interface."""

from sidecar.api.interface import Api, ClientBody, MediaPart
from sidecar.api.registry import api_for_path, default_error_body

__all__ = ["Api", "ClientBody", "MediaPart", "api_for_path", "default_error_body"]
