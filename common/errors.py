"""What a user did wrong, told in one line."""


class UserError(Exception):
    """A fault the user can mend. The message is one line that says what is wrong and where; see `program`."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
