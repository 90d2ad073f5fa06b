"""The library's log, ``logging.getLogger("normgrad")``: every fallback to something slower is reported once."""

from __future__ import annotations

import logging

_logger = logging.getLogger("normgrad")
_reported: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless the same one was logged before in this process."""
    if message not in _reported:
        _reported.add(message)
        _logger.warning("normgrad: %s", message)
