"""The exception for wrong input."""


class UserError(Exception):
    """Wrong input that the user can correct. `common.runtime.program` prints only the message, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
