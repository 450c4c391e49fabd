"""The forms of execution that tests need: asked of the product, and skipped by name where this CPU lacks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from experts.backends.forms import form_of

if TYPE_CHECKING:
    from experts.expert import Precision


def needs(form: Precision) -> pytest.MarkDecorator:
    """A mark for tests, and parameters, that run in this form."""
    reason = form_of(form).why_absent()
    return pytest.mark.skipif(reason is not None, reason=f"{form} does not run on this CPU: {reason}")


def each_of(*forms: Precision) -> list[object]:
    """The forms as parameters of a test."""
    return [pytest.param(form, marks=needs(form), id=form) for form in forms]
