"""User errors, which are reported in one line without a traceback."""


class UserError(Exception):
    """A wrong option, file or directory: the message names it, its value and the remedy.

    The command line prints the message on one line and exits with code 2.
    """
