"""Values for the flags of other programs, for tests that try all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reconv.migrate.flags import Flag, any_text_is_true, text_bool, yes_no
from reconv.migrate.programs.habana_tensorflow import profile_range
from reconv.migrate.programs.program import Program
from reconv.migrate.programs.timm_train import yaml_file

# Flags that need a value of a certain kind, or others beside them.
VALUES = {
    "profile_steps": ["5:8"],
    "hooks": ["ProfilerHook"],
    "loss_scale": ["64"],
    "learning_rate_schedule": ["0.3", "0.6"],
    "learning_rate_decay": ["0.1"],
    "model_size": ["50"],
    "lars_skip_list": ["bias"],
    "aa": ["rand-m7-mstd0.5-inc1"],
    "opt": ["sgd"],
    "sched": ["cosine"],
    "auto_augment": ["ta_wide"],
    "scale": ["0.1", "1.0"],
    "ratio": ["0.75", "1.3"],
    "mean": ["0.5", "0.5", "0.5"],
    "std": ["0.5", "0.5", "0.5"],
    "opt_betas": ["0.9", "0.99"],
    "custom_lr_values": ["0.1", "0.01"],
    "custom_lr_milestones": ["0", "30"],
    "multistep": ["30", "60"],
    "lr_steps": ["30", "60"],
    "resnet_size": ["50"],
    "val_resize_size": ["256"],
    "optimiser": ["momentum"],
    "lr_base_scale": ["linear"],
}
# What a flag needs beside it to be valid at all.
COMPANIONS = {
    "custom_lr_values": ["--custom-lr-milestones", "0", "30"],
    "custom_lr_milestones": ["--custom-lr-values", "0.1", "0.01"],
}
NUMBERS = {"model_ema_decay": "0.999", "momentum": "0.8", "use_ema": "0.999", "block_survival_prob": "0.9"}


def example_values(item: Flag) -> list[str]:
    """The words after a flag."""
    if item.arity == 0:
        return []
    if item.key in VALUES and item.type is not profile_range:
        return VALUES[item.key]
    kinds: dict[Callable[[str], Any], str] = {
        int: "4",
        float: NUMBERS.get(item.key, "0.5"),
        text_bool: "True",
        yes_no: "true",
        any_text_is_true: "True",
        profile_range: "5,8",
        yaml_file: "none.yaml",
    }
    text = str(item.choices[-1]) if item.choices else kinds.get(item.type, "text")
    count = item.arity if isinstance(item.arity, int) else 2 if item.arity in ("+", "*") else 1
    return [text] * count


def words_of(program: Program, items: list[Flag]) -> list[str]:
    """A command of a program with these flags."""
    words: list[str] = []
    for item in items:
        values = example_values(item)
        if program.dialect == "absl" and values:
            words += [f"{item.name}={','.join(values)}"]
        else:
            words += [item.name, *values]
    return words
