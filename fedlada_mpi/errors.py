"""The one exception for everything a user can mend."""


class UserError(Exception):
    """Bad input: the message says what was found, what was expected and the command that mends it."""
