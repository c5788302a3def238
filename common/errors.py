"""The exception for errors that the user can correct."""


class UserError(Exception):
    """An error that the user can correct: `common.runtime.program` prints its one-line message without traceback."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
