"""The forms of execution that tests need: asked of the product, and skipped by name where this CPU lacks one."""

import pytest

from experts.backends.forms import form_of


def needs(form):
    """A mark for tests, and parameters, that run in this form."""
    reason = form_of(form).why_absent()
    return pytest.mark.skipif(reason is not None, reason=f"{form} does not run on this CPU: {reason}")


def each_of(*forms):
    """The forms as parameters of a test."""
    return [pytest.param(form, marks=needs(form), id=form) for form in forms]
