"""Each kernel against `copy_` of the same tensor and against the plain torch way."""
