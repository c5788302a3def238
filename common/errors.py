"""What a user did wrong, told in one line."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A fault the user can mend. The message is one line that says what is wrong and where."""


def run(main: Callable[[], None]) -> None:
    """Calls main; a UserError becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
