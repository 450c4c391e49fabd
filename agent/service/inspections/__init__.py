"""From an arrival to a committed verdict: boards cut, images judged once, rows written, boards decided."""
