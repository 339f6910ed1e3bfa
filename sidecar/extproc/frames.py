"""Lets go of what a finished failure still holds."""

from __future__ import annotations

import traceback


def release_frames(error: BaseException) -> None:
    """Clear the local variables of all frames an exception, its causes and its parts have passed through.

    A traceback keeps every local of its frames alive: the body of the request, its parsed form, the answers.
    Some of those frames lead back to the exception, so only the cyclic collector would free them, long after
    the request has given its bytes back to the budget.
    """
    pending = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [linked for linked in (current.__cause__, current.__context__) if linked is not None]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
