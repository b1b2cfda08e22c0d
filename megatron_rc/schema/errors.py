"""Exceptions of other people's code as part of one of our sentences."""


def one_line(error: BaseException) -> str:
    """The type and message of an exception on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
