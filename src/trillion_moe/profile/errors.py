"""What goes wrong with a measurement."""


class ProfileError(ValueError):
    """What cannot be measured, or a result that is wrong: the flag or the operation, the numbers, what is legal."""
