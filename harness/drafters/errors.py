"""The one error of this package: a drafter that cannot be used as given."""

from __future__ import annotations


class DrafterError(ValueError):
    """A checkpoint, its configuration, or the way it is used contradicts itself or us. Its text is one line for the
    user."""
