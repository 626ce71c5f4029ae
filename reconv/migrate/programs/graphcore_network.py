"""Graphcore's TensorFlow CNNs: the flags of the network."""

from __future__ import annotations

from reconv.core.errors import UsageError
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_EFFICIENTNETS = {  # dropout, image size
    "B0": (0.2, 224),
    "B1": (0.2, 240),
    "B2": (0.3, 260),
    "B3": (0.3, 300),
    "B4": (0.4, 380),
    "B5": (0.4, 456),
    "B6": (0.5, 528),
    "B7": (0.5, 600),
}
_ONLY_EFFICIENTNET = (
    *("dropout_rate", "block_survival_prob", "no_se", "depth_divisor", "top_width", "use_relu", "expand_ratio"),
    *("norm_epsilon", "proxy_norm", "proxy_epsilon", "width_coefficient", "depth_coefficient"),
)
_ONLY_RESNEXT = ("convolution_groups", "widenet")


def translate_network(t: Translation, is_cifar: bool) -> None:
    """Set the network, its norm and the image size that it takes."""
    t.set("model.options.padding", "same")
    if t["model"] == "efficientnet":
        _efficientnet(t, is_cifar)
    else:
        _resnet(t, is_cifar)


def _resnet(t: Translation, is_cifar: bool) -> None:
    size = t["model_size"] or {"resnet": ("18", "20"), "resnext": ("14", "11")}[t["model"]][is_cifar]
    t.set("model.name", _resnet_name(t, size, is_cifar), "model_size", "model")
    t.set("model.options.conv_init", "tf_fan_in")
    t.set("model.options.linear_init", "glorot")
    if not is_cifar:
        t.set("model.options.project_first", True)
        t.set("model.options.zero_gamma", "no-projection")
    if t["model"] == "resnext":
        if t["convolution_groups"] not in (None, 32):
            t.set("model.options.groups", t["convolution_groups"], "convolution_groups")
        else:
            t.explain("convolution_groups", "no effect", "32 is what the network has")
        if t["group_dim"] not in (None, 4):
            t.set("model.options.width_per_group", t["group_dim"], "group_dim")
        else:
            t.explain("group_dim", "no effect", "4 is what the network has")
    else:
        for key in (*_ONLY_RESNEXT, "group_dim"):
            t.explain(key, "not supported", f"is for resnext, and the network is {t['model']}; leave it out")
    for key in _ONLY_EFFICIENTNET:
        t.explain(key, "not supported", f"is for efficientnet, and the network is {t['model']}; leave it out")
    _norm(t, is_cifar, default_groups=16 if is_cifar else 32)
    if t["image_size"] and not is_cifar:
        t.set("data.preprocess.size", t["image_size"], "image_size")
        if t["image_size"] != 224:
            t.set("data.preprocess.resize", "auto-ratio", "image_size")


def _resnet_name(t: Translation, size: str, is_cifar: bool) -> str:
    family, suffix = t["model"], "_32x4d" if t["model"] == "resnext" else ""
    if not is_cifar:
        name = f"{family}{size}{suffix}"
    elif family == "resnext":
        name = f"resnext{size}{'_wide' if t['widenet'] else ''}_cifar"
    else:
        name = f"resnet{size}_cifar"
        if name not in MODEL_NAMES or size == "56":  # theirs resolves 56 to the bottleneck form
            name = f"resnet{size}_bottleneck_cifar"
    if name not in MODEL_NAMES:
        raise UsageError(f"there is no {family} of size {size} for this data", hint="see `reconv recipes --all`")
    if t["widenet"]:
        t.explain("widenet", "renamed", f"model.name={name}")
    return name


def _efficientnet(t: Translation, is_cifar: bool) -> None:
    size = t["model_size"] or "B0"
    size = f"B{size}" if size.isdigit() else size
    if size not in _EFFICIENTNETS and size != "CIFAR":
        raise UsageError(f"there is no EfficientNet of size {size}", hint="it is one of B0 to B7, or cifar")
    dropout, pixels = _EFFICIENTNETS.get(size, (0.0, 32))
    t.set("model.name", f"efficientnet_{size.lower()}", "model_size", "model")
    t.set("model.options.conv_init", "tf_fan_out")
    t.set("model.options.dropout", dropout if t["dropout_rate"] is None else t["dropout_rate"], "dropout_rate")
    t.set("model.options.drop_connect", round(1 - t["block_survival_prob"], 12), "block_survival_prob")
    t.set("model.options.group_dim", t["group_dim"] or 1, "group_dim")
    t.set("model.options.expand_ratio", t["expand_ratio"], "expand_ratio")
    for key, name, value in (
        ("no_se", "se", False),
        ("use_relu", "activation", "relu"),
        ("depth_divisor", "depth_divisor", t["depth_divisor"]),
        ("top_width", "top_width", t["top_width"]),
        ("width_coefficient", "width_coefficient", t["width_coefficient"]),
        ("depth_coefficient", "depth_coefficient", t["depth_coefficient"]),
    ):
        if t.is_typed(key):
            t.set(f"model.options.{name}", value, key)
    for key in _ONLY_RESNEXT:
        t.explain(key, "not supported", "is for resnext, and the network is efficientnet; leave it out")
    _norm(t, is_cifar=False, default_groups=4)
    t.set("model.options.norm_eps", t["norm_epsilon"], "norm_epsilon")
    if t["proxy_norm"]:
        t.set("model.options.norm", "proxy", "proxy_norm")
        t.set("model.options.proxy_eps", t["proxy_epsilon"], "proxy_epsilon")
    else:
        t.explain("proxy_epsilon", "no effect", "without --proxy-norm there is no proxy")
    if not is_cifar:
        t.set("data.preprocess.size", t["image_size"] or pixels, "image_size")
        t.set("data.preprocess.resize", "auto-ratio", "image_size")


def _norm(t: Translation, is_cifar: bool, default_groups: int) -> None:
    is_batch = t["batch_norm"] or (is_cifar and not t["group_norm"])
    if is_batch:
        t.set("model.options.bn_momentum", round(1 - t["BN_decay"], 12), "BN_decay")
        t.explain("batch_norm", "same", "batch norm is the default here")
        t.explain("groups", "no effect", "batch norm has no groups")
        t.explain("group_norm", "no effect", "--batch-norm decides")
        return
    t.set("model.options.norm", "group", "group_norm")
    t.set("model.options.norm_groups", t["groups"] or default_groups, "groups")
    t.explain("BN_decay", "no effect", "group norm has no running statistics")
    t.explain("BN_span", "no effect", "group norm does not depend on the batch")
