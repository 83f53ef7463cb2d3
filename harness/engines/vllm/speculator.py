"""Drafting on vLLM's V2 runner, which serves dense targets on CUDA (written next)."""


def install() -> None:
    """Make vLLM's V2 runner draft with our speculators."""
    raise NotImplementedError
