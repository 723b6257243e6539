"""The exception that every check of the fuzz raises."""


class Violation(AssertionError):
    """Something that an engine must not do."""
