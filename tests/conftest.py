from __future__ import annotations

from hypothesis import HealthCheck, settings

# A shared machine may be slow at any moment; how long an example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
