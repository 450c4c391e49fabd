"""Names of architectures, known without importing the runtimes that build them."""

from __future__ import annotations

import re

from experts.document import suggestion

# fmt: off
CLASSIFIERS = (  # torchvision's own list; a test compares the two
    "alexnet", "convnext_base", "convnext_large", "convnext_small", "convnext_tiny", "densenet121", "densenet161",
    "densenet169", "densenet201", "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3",
    "efficientnet_b4", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7", "efficientnet_v2_l",
    "efficientnet_v2_m", "efficientnet_v2_s", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mnasnet0_75",
    "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_16gf",
    "regnet_x_1_6gf", "regnet_x_32gf", "regnet_x_3_2gf", "regnet_x_400mf", "regnet_x_800mf", "regnet_x_8gf",
    "regnet_y_128gf", "regnet_y_16gf", "regnet_y_1_6gf", "regnet_y_32gf", "regnet_y_3_2gf", "regnet_y_400mf",
    "regnet_y_800mf", "regnet_y_8gf", "resnet101", "resnet152", "resnet18", "resnet34", "resnet50",
    "resnext101_32x8d", "resnext101_64x4d", "resnext50_32x4d", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0", "squeezenet1_1", "swin_b", "swin_s", "swin_t",
    "swin_v2_b", "swin_v2_s", "swin_v2_t", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19",
    "vgg19_bn", "vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32", "wide_resnet101_2", "wide_resnet50_2",
)
# fmt: on
DETECTORS = re.compile(
    r"yolov3(-spp|-tiny)?|yolov5[nsmlx]?(-p6|6)?|yolov6[nsmlx]?|yolov8[nsmlx]?(-ghost)?(-p2|-p6)?"
    r"|yolov9[tsmce]|yolov10[nsmblx]|yolo1[12][nsmlx]?|yolo26[nsmlx]?(-p2|-p6)?"
)
RESNETS = ("resnet", "resnext", "wide_resnet")
PLAIN = "plain"
NO_MAXPOOL, TRANSFORM_INPUT = "no-maxpool", "transform-input"
LANGUAGE_MODELS = ("llama", "qwen", "mixtral", "mistral", "olmo", "pr_moe")
DETECTOR_EXAMPLES = ("yolov5m", "yolov5l", "yolov8n", "yolo11n")


def served_variants(architecture: str) -> tuple[str, ...]:
    """Variants with the names and shapes of an architecture's weights, and another computation."""
    if architecture.startswith(RESNETS):
        return (NO_MAXPOOL,)
    return (TRANSFORM_INPUT,) if architecture in {"googlenet", "inception_v3"} else ()


def known_architecture(text: str) -> str:
    """Return ``text``. Raises ValueError, with the nearest name, for an unknown architecture."""
    if text in {"onnx", "llm", "fake"} or text in CLASSIFIERS or DETECTORS.fullmatch(text):
        return text
    if "llm" in text.lower() or text.lower().startswith(LANGUAGE_MODELS):
        raise ValueError(f"no architecture {text!r} - write llm: its config.json names the architecture")
    if "rtdetr" in text.lower().replace("-", ""):
        raise ValueError(f"{text} is not built from weights - export it to ONNX, and write onnx")
    known = (*CLASSIFIERS, *DETECTOR_EXAMPLES, "onnx")
    hint = suggestion(text, known, "use a torchvision classifier, YOLO, onnx or llm")
    raise ValueError(f"no architecture {text!r} - {hint}")
