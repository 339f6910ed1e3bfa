"""The headers that steer the gateway, which no client may send on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PHASE_TOKEN = "x-epd-phase-token"  # noqa: S105  # the name of a header
HOP_GUARD = "x-epd-hop"

_NAMES = frozenset(
    {
        "epp-profile",
        PHASE_TOKEN,
        "prefer",
        "x-prefill-host-port",
        "x-prefill-pin",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-data-parallel-rank",
    }
)
_PREFIX = "x-gateway-destination-endpoint"


class ControlHeaders:
    """The set of control headers: the fixed ones, and what the deployment adds.

    The hop guard is not among them: a request that carries it is refused.

    Args:
        extra: more names to remove (`headers.strip`, `pipeline.forward_response_headers`), lower-case.
    """

    def __init__(self, extra: Iterable[str] = ()) -> None:
        self._names = _NAMES.union(extra)

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.startswith(_PREFIX)

    def among(self, names: Iterable[str]) -> tuple[str, ...]:
        """The control headers among `names` (lower-case), each once, in order of appearance."""
        return tuple(dict.fromkeys(name for name in names if name in self))
