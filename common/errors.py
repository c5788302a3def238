"""The exception for wrong input."""


class UserError(ValueError):
    """Wrong input that the user can correct: an argument, an option or a file.

    Also raised for a wrong type. The message is one line. `common.runtime.program` prints only the message.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
