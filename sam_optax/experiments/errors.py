"""Mistakes of the user, which deserve one line and no traceback."""


class UserError(Exception):
    """A wrong option, file or directory: the message names it, its value and the remedy.

    The command line prints the message on one line and exits with code 2.
    """
