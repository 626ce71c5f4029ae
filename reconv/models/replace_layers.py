"""Replaces the batch norms and dropouts of a model that was not written for Reconv, so that training it is exact.

Our batch norm updates its running statistics once per step, and our dropouts draw keyed random numbers. A layer keeps
its name, parameters and attributes: only its class changes. A model with other random layers is refused, since they
use torch's global generator and a resumed run would differ.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from reconv.core.errors import UsageError
from reconv.models.layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNormAct2d
from reconv.models.layers.dropout import ChannelDropout, DropConnect, Dropout, KeyedRandomLayer

# Attributes in which packages keep the rate of a dropout that they call as a function: there is no layer to replace.
_RATE_ATTRIBUTE = re.compile(r"(\w+_)?drop(out|_path|_connect|_block)?(_rate|_prob|_p)?|stochastic_depth_prob")
_RANDOM_NAME = re.compile(r"drop|stochastic|noise|shake|random", re.IGNORECASE)
_RANDOM_LAYERS = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d)
_FUSED_ATTENTION = re.compile(r"\bdropout_p\s*=")
# Calls that drop at random without a layer.
_RANDOM_CALL = re.compile(
    r"\b(drop_path|drop_block\w*|stochastic_depth|(feature_|alpha_)*dropout[123]?d?|multi_head_attention_forward)\("
    r"|\btorch\.rand\(|\bbernoulli_?\(|" + _FUSED_ATTENTION.pattern
)
# How timm's models drop features before their classifier.
_HEAD_DROPOUT = re.compile(r"\bF\.dropout\(x, (p=)?(float\()?self\.drop_rate\b")


def replace_layers(model: nn.Module, where: str) -> None:
    """Turn batch norms and dropouts into ours, in place; raises UsageError for layers that cannot be trained exactly.

    `where` names the model in errors.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            _replace_batch_norm(module, f"{where} ({name})")
        elif not isinstance(module, KeyedRandomLayer):
            _replace_dropout(module, f"{where} ({name})")
    _replace_head_dropout(model)
    for name, module in model.named_modules():
        _use_attention_dropout(module)
        _check_random_layer(module, where, name)


def _replace_batch_norm(module: _BatchNorm, where: str) -> None:
    if isinstance(module, BatchNorm2d):
        return
    kind, why = _batch_norm_class(module), ""
    if kind is None:
        why = "only torch's BatchNorm1d, BatchNorm2d and SyncBatchNorm, and timm's BatchNormAct2d are"
    elif not module.track_running_stats or module.momentum is None:
        why = "it has no momentum" if module.track_running_stats else "it has no running statistics"
    if kind is None or why:
        raise UsageError(f"{where} is a batch norm of the class {type(module).__name__}, not supported", why=why)
    module.__class__ = kind
    assert isinstance(module, BatchNorm2d)
    module.init_group_state()


def _batch_norm_class(module: _BatchNorm) -> type[BatchNorm2d] | None:
    """Our class for another package's batch norm; None if it does something else."""
    name = type(module).__name__
    if name in ("BatchNormAct2d", "SyncBatchNormAct"):  # timm's
        return BatchNormAct2d
    is_plain = type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if not is_plain or isinstance(module, nn.BatchNorm3d):
        return None
    return BatchNorm1d if isinstance(module, nn.BatchNorm1d) else BatchNorm2d


def _replace_dropout(module: nn.Module, where: str) -> None:
    """Turn a dropout layer of torch, torchvision or timm into ours; others stay as they are."""
    name, attributes = type(module).__name__, vars(module)
    kind: type[KeyedRandomLayer]
    per: Literal["sample", "batch"] = "sample"
    if type(module) is nn.Dropout:
        kind, rate = Dropout, module.p
    elif type(module) in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        kind, rate = ChannelDropout, attributes["p"]
    elif name == "StochasticDepth":  # torchvision's
        kind, rate, per = DropConnect, attributes["p"], "batch" if attributes["mode"] == "batch" else "sample"
    elif name == "DropPath" and attributes.get("scale_by_keep", True):  # timm's
        kind, rate = DropConnect, attributes["drop_prob"] or 0.0
    else:
        return
    if not 0 <= rate < 1:
        raise UsageError(f"{where} is a {name} with drop rate {rate:g}", why="a drop rate is at least 0 and below 1")
    module.__class__ = kind
    assert isinstance(module, KeyedRandomLayer)
    module.init_keys(float(rate))
    if isinstance(module, DropConnect):
        module.per = per


class DropoutLinear(nn.Linear):
    """A dropout and a linear layer."""

    drop: Dropout

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def _replace_head_dropout(model: nn.Module) -> None:
    """Turn the dropout function that timm's models call before their classifier into a layer of the classifier."""
    rate, get_classifier = getattr(model, "drop_rate", 0.0), getattr(model, "get_classifier", None)
    kind: Any = type(model)
    source = _source(kind) or ""
    if not isinstance(rate, float) or not 0 < rate < 1 or get_classifier is None or not _HEAD_DROPOUT.search(source):
        return
    classifier = get_classifier()
    if isinstance(classifier, nn.Linear):
        classifier.__class__ = DropoutLinear
        classifier.drop = Dropout(rate)
        object.__setattr__(model, "drop_rate", 0.0)


def _use_attention_dropout(module: nn.Module) -> None:
    """Make timm's attention call its dropout layer instead of torch's fused attention, if it drops anything."""
    drop = module._modules.get("attn_drop")
    if isinstance(drop, KeyedRandomLayer) and drop.rate > 0 and getattr(module, "fused_attn", None) is True:
        object.__setattr__(module, "fused_attn", False)


def _check_random_layer(module: nn.Module, where: str, name: str) -> None:
    """Raise UsageError for a layer that would use torch's global generator, or update statistics, in each forward."""
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise UsageError(f"{where} has an instance norm with running statistics ({name}), which is not supported")
    if isinstance(module, KeyedRandomLayer):
        return
    is_leaf = next(module.children(), None) is None
    is_named = is_leaf and _RANDOM_NAME.search(type(module).__name__) is not None
    draws = isinstance(module, _RANDOM_LAYERS) or is_named
    rates = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, float) and (_RATE_ATTRIBUTE.fullmatch(key) or (draws and key in ("p", "prob")))
    }
    if not draws and not _calls_dropout(type(module)):
        rates = {}  # they are those of its layers
    drop = module._modules.get("attn_drop")
    if isinstance(drop, KeyedRandomLayer) and getattr(module, "fused_attn", True) and _fuses_attention(type(module)):
        rates["attn_drop"] = drop.rate
    if any(rate > 0 for rate in rates.values()) or (draws and not rates):
        kind = type(module).__name__
        raise UsageError(
            f"{where} has a random layer of the class {kind}" + (f" ({name})" if name else ""),
            why="it uses torch's global generator, so a resumed run would differ"
            + "".join(f"; its {key} is {rate:g}" for key, rate in rates.items() if rate > 0),
            hint="switch it off in model.options, as in --set model.options.dropout=0, or choose another model",
        )


@cache
def _source(kind: Any) -> str | None:
    """The source of a module's class and its bases, apart from nn.Module; None where it cannot be read."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object) and issubclass(base, nn.Module)]
    try:
        return "\n".join(inspect.getsource(base) for base in bases)
    except (OSError, TypeError):
        return None


def _calls_dropout(kind: Any) -> bool:
    """True if a class may call a dropout function; True where its source cannot be read."""
    source = _source(kind)
    return source is None or _RANDOM_CALL.search(source) is not None


def _fuses_attention(kind: Any) -> bool:
    """True if a class may pass its dropout's rate to torch's fused attention."""
    source = _source(kind)
    return source is None or _FUSED_ATTENTION.search(source) is not None
