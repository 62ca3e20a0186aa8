"""Errors that users may want to catch by name."""


class BackendUnavailableError(RuntimeError):
    """A named implementation cannot run here; the message says what is missing."""
