"""The named configurations of Graphcore's CNNs (configs.yml): the MLPerf v1.1 copy, and those that came later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconv.core.errors import UsageError
from reconv.migrate.config_file import read_config
from reconv.migrate.flags import Flag, ParsedWords, Typed
from reconv.recipe.presets import nearest

_FOUR_EARLY = {"pipeline": True, "pipeline_schedule": "Grouped", "enable_recomputation": True}
_MLPERF: dict[str, Any] = {
    "model": "resnet",
    "model_size": 50,
    "dataset": "imagenet",
    "batch_norm": True,
    "BN_decay": 0.9,
    "BN_span": 2,
    "optimiser": "momentum",
    "momentum": 0.9,
    "weight_decay": 2.5e-05,
    "label_smoothing": 0.1,
    "lr_schedule": "polynomial_decay_lr",
    "warmup_epochs": 5,
    "abs_end_learning_rate": 0.0001,
    "normalise_input": True,
    "eight_bit_io": True,
    "fused_preprocessing": True,
    "standard_imagenet": True,
    "pipeline": True,
    "shards": 1,
    "pipeline_schedule": "Sequential",
    "enable_recomputation": True,
    "enable_half_partials": True,
    "disable_variable_offloading": True,
    "mlperf_logging": True,
    "internal_exchange_optimisation_target": "memory",
    "max_cross_replica_buffer_size": 52428800,
    "epochs_per_ckpt": 4,
    "logs_per_epoch": 5,
}
_LARS: dict[str, Any] = {
    **_MLPERF,
    "optimiser": "LARS",
    "warmup_epochs": 2,
    "weight_decay": 5e-05,
    "lars_weight_decay": 5e-05,
    "loss_scaling": 128,
    "ckpt_epochs_offset": 2,
    "batch_size": 20,
    "gather_conv_output": True,
}
_BN: dict[str, Any] = {
    "model": "resnet",
    "model_size": 50,
    "dataset": "imagenet",
    "normalise_input": True,
    "eight_bit_io": True,
    "stable_norm": True,
    "enable_half_partials": True,
    "enable_recomputation": True,
    "ckpts_per_epoch": 1,
    "logs_per_epoch": 1,
    "weight_decay": 0.0001,
    "loss_scaling": 128,
    "epochs": 100,
    "batch_size": 16,
    "internal_exchange_optimisation_target": "balanced",
    "optimiser": "momentum",
    "momentum": 0.9,
    "batch_norm": True,
    "precision": "16.32",
    "lr_schedule": "cosine",
    "base_learning_rate_exponent": -13,
    "label_smoothing": 0.1,
    "shards": 4,
    "pipeline": True,
    "pipeline_schedule": "Grouped",
    "pipeline_num_parallel": 32,
    "disable_variable_offloading": True,
}
_EFFICIENTNET: dict[str, Any] = {
    "model": "efficientnet",
    "model_size": 4,
    "dataset": "imagenet",
    "precision": "16.32",
    "groups": 4,
    "optimiser": "RMSprop",
    "lr_schedule": "exponential",
    "weight_avg_exp": [0.97],
    "enable_half_partials": True,
    "cutmix_lambda": 0.85,
    "cutmix_version": 1,
    "mixup_alpha": 0.2,
    "enable_conv_dithering": True,
    "internal_exchange_optimisation_target": "balanced",
    "disable_variable_offloading": True,
    "shards": 4,
    **_FOUR_EARLY,
}
_G1 = {**_EFFICIENTNET, "group_dim": 1, "expand_ratio": 6, "batch_size": 3}
_G16 = {**_EFFICIENTNET, "group_dim": 16, "expand_ratio": 4, "batch_size": 5}
_RESNEXT: dict[str, Any] = {
    "model": "resnext",
    "model_size": 101,
    "dataset": "imagenet",
    "epochs": 120,
    "optimiser": "momentum",
    "momentum": 0.9,
    "normalise_input": True,
    "stable_norm": True,
    "base_learning_rate_exponent": -11,
    "enable_half_partials": True,
    "lr_schedule": "cosine",
    "label_smoothing": 0.1,
    "eight_bit_io": True,
    "shards": 2,
    "ckpts_per_epoch": 1,
    "disable_variable_offloading": True,
    "internal_exchange_optimisation_target": "balanced",
    **_FOUR_EARLY,
}
_MK1: dict[str, Any] = {
    "model": "resnet",
    "model_size": 50,
    "dataset": "imagenet",
    "epochs": 65,
    "optimiser": "momentum",
    "momentum": 0.9,
    "normalise_input": True,
    "stable_norm": True,
    "enable_half_partials": True,
    "lr_schedule": "cosine",
    "label_smoothing": 0.1,
    "ckpts_per_epoch": 1,
    "shards": 4,
    "max_cross_replica_buffer_size": 100000000,
    "internal_exchange_optimisation_target": "balanced",
    **_FOUR_EARLY,
}


def _split(base: Mapping[str, Any], accumulation: int, replicas: int, **more: Any) -> dict[str, Any]:
    return {**base, "gradient_accumulation_count": accumulation, "replicas": replicas, **more}


CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "mk2_resnet8_test": {
        "model": "resnet",
        "model_size": 8,
        "dataset": "cifar-10",
        "ckpts_per_epoch": 0,
        "logs_per_epoch": 1,
        "enable_half_partials": True,
        "gradient_accumulation_count": 1,
        "replicas": 1,
        "epochs": 10,
        "validation": False,
    },
    "mk2_resnet50_mlperf_pod16": _split(_MLPERF, 9, 16, batch_size=16, abs_learning_rate=4.588, epochs=44),
    "mk2_resnet50_mlperf_pod16_bs20": _split(_MLPERF, 6, 16, batch_size=20, abs_learning_rate=3.824, epochs=40),
    "mk2_resnet50_mlperf_pod64_bs20": _split(
        _MLPERF, 2, 64, batch_size=20, abs_learning_rate=5.098, epochs=41, ckpt_epochs_offset=1
    ),
    "mk2_resnet50_mlperf_pod128_bs20": _split(
        _MLPERF, 1, 128, batch_size=16, abs_learning_rate=4.078, epochs=41, ckpt_epochs_offset=1
    ),
    "mk2_resnet50_mlperf_pod16_lars": _split(_LARS, 10, 16, abs_learning_rate=10.72, epochs=38),
    "mk2_resnet50_mlperf_pod64_lars": _split(_LARS, 3, 64, abs_learning_rate=12.15, epochs=38),
    "mk2_resnet50_mlperf_pod128_lars": _split(
        _LARS, 2, 128, abs_learning_rate=11.2, epochs=41, ckpt_epochs_offset=1, lars_weight_decay=1e-4
    ),
    "mk2_resnet50_mlperf_pod256_lars": _split(
        _LARS, 2, 256, abs_learning_rate=17.2, epochs=45, ckpt_epochs_offset=1, lars_weight_decay=1e-4
    ),
    "mk2_resnet50_bn_16ipus": _split(_BN, 256, 4),
    "mk2_resnet50_bn_64ipus": _split(_BN, 64, 16),
    "mk2_resnet50_bn_128ipus": _split(_BN, 32, 32),
    "mk2_resnet50_gn_16ipus": {
        **{key: value for key, value in _BN.items() if key not in ("batch_norm", "precision", "shards", "pipeline")},
        "batch_size": 8,
        "gradient_accumulation_count": 8,
        "replicas": 16,
        "epochs": 65,
        "base_learning_rate_exponent": -11,
    },
    "mk2_resnext101_16ipus": _split(_RESNEXT, 16, 8, batch_size=6),
    "mk2_efficientnet_b4_g1_16ipus": _split(_G1, 64, 4),
    "mk2_efficientnet_b4_g1_32ipus": _split(_G1, 32, 8),
    "mk2_efficientnet_b4_g1_64ipus": _split(_G1, 16, 16),
    "mk2_efficientnet_b4_g16_16ipus": _split(_G16, 40, 4),
    "mk2_efficientnet_b4_g16_64ipus": _split(_G16, 8, 16),
    "mk2_efficientnet_b4_g16_64ipus_LARS": _split(
        _G16,
        38,
        16,
        optimiser="LARS",
        lr_schedule="polynomial_decay_lr",
        base_learning_rate_exponent=-9.5,
        warmup_epochs=50,
    ),
    "mk1_resnet50_16ipus": _split(_MK1, 64, 4, batch_size=4),
}
_NEGATED = {"validation": "no_validation", "proxy_recompute": "no_proxy_recompute", "dataset_cache": "no_dataset_cache"}


def configured(flags: tuple[Flag, ...], parsed: ParsedWords) -> list[Typed]:
    """The values of the configuration that --config names, from --config-path or Graphcore's own file."""
    given = {item.flag.key: item.value for item in parsed.typed}
    name = given.get("config")
    if not name:
        return []
    known: Mapping[str, Any] = CONFIGURATIONS
    if given.get("config_path"):
        known = read_config(given["config_path"]) or CONFIGURATIONS
    if name not in known:
        near = nearest(name, known)
        if near is not None:
            raise UsageError(
                f"configs.yml has no configuration {name!r}",
                hint=f"did you mean {near}? A file of your own: --config-path FILE",
            )
        return []
    values = dict(known[name] or {})
    if "micro_batch_size" in values:
        values["batch_size"] = values.pop("micro_batch_size")
    by_key = {item.key: item for item in flags}
    for key, negated in _NEGATED.items():
        if key in values:
            values[negated] = not values.pop(key)
    unknown = [key for key in values if key not in by_key]
    if unknown:
        raise UsageError(f"the configuration {name} has {unknown[0]!r}, which is no flag of train.py")
    return [
        Typed(by_key[key], _typed_value(by_key[key], value), f"{key}: {value}", origin=f"config {name}")
        for key, value in values.items()
        if not (by_key[key].arity == 0 and value is False)
    ]


def _typed_value(item: Flag, value: Any) -> Any:
    """A value of YAML as the command line would give it."""
    if item.arity == 0:
        return bool(value)
    values = value if isinstance(value, list) else [value]
    try:
        parsed = [item.type(str(part)) for part in values]
    except ValueError as error:
        raise UsageError(f"{item.name} of the configuration cannot be {value!r}") from error
    return parsed if item.arity in ("+", "*") else parsed[0]
