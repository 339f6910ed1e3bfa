"""Which models need their tensors: what `mm_payload: auto` has learnt.

The only thing that outlives a request, and only a hint: forgetting it costs one more render call.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MODELS = 256
_SECONDS = 3600.0


class TensorMemory:
    """Models whose media, by modality, cannot travel without tensors.

    Each is forgotten after an hour; of more than 256 the one learnt first.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expiry: OrderedDict[tuple[str, str], float] = OrderedDict()

    def remember(self, model: str, modality: str) -> None:
        """Note that a model needs the tensors of a modality."""
        self._expiry.pop((model, modality), None)
        self._expiry[model, modality] = self._clock() + _SECONDS
        while len(self._expiry) > _MODELS:
            self._expiry.popitem(last=False)

    def knows(self, model: str, modality: str) -> bool:
        """Whether a model is known to need the tensors of a modality."""
        expiry = self._expiry.get((model, modality))
        if expiry is None:
            return False
        if expiry <= self._clock():
            del self._expiry[model, modality]
            return False
        return True
