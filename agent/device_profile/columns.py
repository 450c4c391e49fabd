"""Column types of a device profile: types of its records' fields, each with its text for a refusal.

SQLite columns take text as well, and text compares above any number: so the types are strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from experts.expert import Precision

SHARE_ROUNDING = 1e-9  # shares are sums of quotients


def one_of(*words: str) -> Any:  # noqa: ANN401  # as pydantic types what it makes of it
    return Field(strict=True, pattern=f"^({'|'.join(words)})$", description=f"one of {', '.join(words)}")


Text = Annotated[str, Field(strict=True, description="text")]
MaybeText = Annotated[Text | None, Field(description="text, or nothing")]
Count = Annotated[int, Field(strict=True, ge=0, description="a whole number from 0")]
MaybeCount = Annotated[Count | None, Field(description="a whole number from 0, or nothing")]
PositiveCount = Annotated[int, Field(strict=True, ge=1, description="a whole number from 1")]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False, description="a finite number from 0")]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a finite number above 0")]
Share = Annotated[float, Field(strict=True, ge=0, le=1 + SHARE_ROUNDING, description="a number from 0 to 1")]
MaybeShare = Annotated[Share | None, Field(description="a number from 0 to 1, or nothing")]
Form = Annotated[str, one_of(*Precision)]

# JSON in the file.
Texts = Annotated[tuple[Text, ...], Field(min_length=1, description="a list, each text")]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, description="a list, each a finite number from 0")]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1, description="a list, each a finite number above 0")]
TextByName = Annotated[Mapping[str, Text], Field(description="names, each with text")]
NumberByName = Annotated[Mapping[str, Number], Field(description="names, each with a finite number from 0")]
