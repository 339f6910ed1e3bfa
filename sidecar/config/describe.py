"""The effective configuration as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from sidecar.config.settings import Settings


def describe(settings: Settings) -> str:
    """Every key with its effective value as YAML; the phase token shows as "set" or "not set"."""
    return yaml.safe_dump(settings.model_dump(), sort_keys=False, allow_unicode=True, width=1000)
