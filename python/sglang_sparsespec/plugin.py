"""The SGLang plugin entry point. It runs in every process of the server, so it imports nothing heavy."""


def register() -> None:
    """Placeholder until the algorithm lands."""
