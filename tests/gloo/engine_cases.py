"""All cases that two ranks run in one launch."""

from gloo import gradient_cases, model_cases, step_cases
from gloo.support import Case

CASES: dict[str, Case] = {**gradient_cases.CASES, **model_cases.CASES, **step_cases.CASES}
