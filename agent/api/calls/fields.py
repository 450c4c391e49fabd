"""Counts the fields of a protobuf message before it is parsed.

Guarantees: reads no field's content, and no further than it was asked to count. It is no check of the message: what is
cut or otherwise wrong is for the parser to tell.

Why: parsing makes an object of each embedded message, fifty times the two bytes that an empty one takes on the wire. So
a message within the limit of bytes could still take gigabytes.
"""

from __future__ import annotations

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5  # protobuf's encoding, "Message Structure"
FIXED_BYTES = {FIXED_64: 8, FIXED_32: 4}
VARINT_BYTES = 10  # the longest


def has_more_fields(message: bytes, most: int) -> bool:
    """True if a message has more fields of its own than the limit; embedded messages count as one."""
    position = 0
    for _ in range(most):
        if position >= len(message):
            return False
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == VARINT:
            _, position = _varint(message, position)
        elif kind == LENGTH:
            size_bytes, position = _varint(message, position)
            position += size_bytes
        else:
            position += FIXED_BYTES.get(kind, 0)
    return position < len(message)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number there, and where it ends; of one that is cut, or has no end, what there is of it."""
    number = 0
    for place, byte in enumerate(message[position : position + VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * place
        position += 1
        if byte < 0x80:
            break
    return number, position
