"""Entry point of the CPU platform."""


def activate() -> str | None:
    return None
