"""What goes wrong in a lab for a reason other than a wrong argument."""


class LabError(RuntimeError):
    """This machine cannot do what the lab asked of it; the message says what to do."""
