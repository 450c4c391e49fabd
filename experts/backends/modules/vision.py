"""torchvision's models and operators, imported without torch's compiler (``experts.backends.modules.compiler``)."""

from experts.backends.modules.compiler import compiler_left_out

with compiler_left_out():
    from torchvision import models, ops

__all__ = ["models", "ops"]
