"""Habana Model-References, TensorFlow ResNeXt: imagenet_main.py, whose flags are absl's."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.core.errors import UsageError
from reconv.migrate.flags import Flag, flag, switch
from reconv.migrate.programs.program import Program, epochs, missing_data, needs_weights, refuse_positional, steps
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_TENSORFLOW = "tunes TensorFlow itself"
_CLOUD = "uploads results; logs are files of the run directory"
_STRATEGY = "is a strategy of TensorFlow; --devices N starts processes here"
_SEED = "the order and augmentation of data follow --seed N"
_MINI_PERCENT = 10  # how large the subset is depends on who made it
_DEFAULT_DATA = "/data/tensorflow/imagenet/tf_records"


def profile_range(text: str) -> tuple[int, int]:
    """`5,8` as the first and last step."""
    words = text.split(",")
    if len(words) != 2 or not all(word.strip().isdigit() for word in words):
        raise ValueError("two steps are needed, as in 5,8")
    return int(words[0]), int(words[1])


FLAGS: tuple[Flag, ...] = (
    flag("--data_dir -dd", str),
    flag("--jpeg_data_dir -jpdd", str),
    flag("--model_dir -md", str, run="--out"),
    switch("--clean", none="every run has a new folder"),
    flag("--train_epochs -te", float, 10.0),
    flag("--epochs_between_evals -ebe", float, 1.0),
    flag("--stop_threshold -st", float),
    flag("--batch_size -bs", int, 32, positive=True),
    flag("--num_gpus -ng", int, 1),
    flag("--hooks -hk", str, "LoggingTensorHook"),
    flag("--export_dir -ed", str),
    flag("--distribution_strategy -ds", str, "off", none=_STRATEGY),
    flag("--display_steps -dis", int, 100, sets="log.every", convert=steps),
    switch("--disable_checkpoints"),
    flag("--save_checkpoint_steps -cs", int),
    switch("--no_hpu"),
    switch("--dummy_epoch", none="the first steps are left out of images/s; --dry-run N tries some"),
    flag("--inter_op_parallelism_threads -inter", int, 0, none=_TENSORFLOW),
    flag("--intra_op_parallelism_threads -intra", int, 0),
    switch("--use_synthetic_data -synth"),
    flag("--max_train_steps -mts", int, positive=True),
    flag("--max_eval_steps -mes", int, positive=True),
    flag("--data_loader_image_type -dlit", str, "fp32", choices=("fp16", "fp32", "bf16")),
    flag("--dtype -dt", str, "fp32", choices=("fp16", "fp32", "bf16")),
    flag("--bf16_config_path", str, none="lists operations; precision.ops does, and the default list is bf16's"),
    flag("--loss_scale -ls", str),
    flag("--all_reduce_alg -ara", str, none=_STRATEGY),
    flag("--num_packs", int, 1, none=_STRATEGY),
    flag("--tf_gpu_thread_mode -gt_mode", str, none=_TENSORFLOW),
    flag("--per_gpu_thread_count -pgtc", int, 0, none=_TENSORFLOW),
    flag("--datasets_num_private_threads", int, sets="data.num_workers"),
    switch("--tf_data_experimental_slack", none=_TENSORFLOW),
    flag("--data_format -df", str, "channels_last", choices=("channels_first", "channels_last")),
    flag("--benchmark_logger_type", str, "BaseBenchmarkLogger", none="see summary.json, or --json FILE"),
    flag("--benchmark_test_id -bti", str, none="names a benchmark; --out DIR names the run"),
    flag("--benchmark_log_dir -bld", str, none="see summary.json, or --json FILE"),
    flag("--log_steps", int, 100),
    flag("--gcp_project -gp", str, none=_CLOUD),
    flag("--bigquery_data_set -bds", str, "test_benchmark", none=_CLOUD),
    flag("--bigquery_run_table -brt", str, "benchmark_run", none=_CLOUD),
    flag("--bigquery_run_status_table -brst", str, "benchmark_run_status", none=_CLOUD),
    flag("--bigquery_metric_table -bmt", str, "benchmark_metric", none=_CLOUD),
    flag("--worker_hosts", str, none="is for the launcher: torchrun, mpirun or srun"),
    flag("--task_index", int, -1, none="is set by the launcher"),
    switch("--experimental_preloading", True, none="data is prefetched here; data.prefetch says how far"),
    flag("--train_offset", int, 0, missing="adds epochs to the length; give --epochs the sum"),
    flag("--resnet_version -rv", str, "1", choices=("1", "2")),
    switch("--return_before_eval -rbv"),
    switch("--disable_eval"),
    switch("--fine_tune -ft", sets="model.freeze_backbone"),
    flag("--pretrained_model_checkpoint_path -pmcp", str),
    switch("--eval_only"),
    switch("--image_bytes_as_serving_input", none="exported models take images; reconv serve takes JPEG files"),
    switch("--use_train_and_evaluate", none="there is one loop for training and evaluation"),
    switch("--enable_lars"),
    flag("--epochs_for_lars", float, 38.0),
    flag("--start_learning_rate", float, 9.5),
    flag("--label_smoothing", float, 0.1, sets="loss.label_smoothing"),
    flag("--warmup_epochs", float, 8.0),
    switch("--disable_warmup"),
    switch("--use_cosine_lr", True),
    flag("--weight_decay", float, 6.103515625e-05, sets="optimizer.weight_decay"),
    flag("--momentum", float, 0.875, sets="optimizer.momentum"),
    flag("--model_type", str, "resnext", choices=("resnet", "resnext")),
    flag("--resnet_size -rs", str, "101", choices=("18", "34", "50", "101", "152", "200")),
    flag("--save_summary_steps", int, 100),
    switch("--enable_scoped_allocator", none=_TENSORFLOW),
    flag("--profile_steps", profile_range, (7, 10)),
    switch("--use_horovod -hvd", none="processes are started by --devices or a launcher"),
    switch("--mini_imagenet"),
    flag("--max_cpus -mc", int, 16, none="caps cores; engine.num_threads does"),
    flag("--shuffle_seed", int, none=_SEED),
    flag("--sample_distorted_bounding_box_seed", int, 0, none=_SEED),
    flag("--random_flip_left_right_seed", int, none=_SEED),
    flag("--dataset_parallel_calls", int, sets="data.num_workers"),
    flag("--interleave_cycle_length", int, 10, none="samples are read by index in a seeded order"),
    flag("-v --verbosity --stderrthreshold --logger_levels", str, none="is about printing"),
    switch("--alsologtostderr --logtostderr --showprefixforinfo --only_check_args", none="is about printing"),
    flag("--log_dir", str, none="see logs/ in the run directory"),
)


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of imagenet_main.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _network(t)
    t.set("length", epochs(t["train_epochs"]), "train_epochs")
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    # Under Horovod the batch is that of a worker; a strategy of TensorFlow divides it among its GPUs.
    t.set("batch.group", max(1, t["batch_size"] // max(1, t["num_gpus"])), "batch_size", "num_gpus")
    if t["num_gpus"] == -1:
        t.notes.append("--num_gpus -1 divides the batch among all GPUs: set batch.group to the images of one")
    if t["enable_lars"]:
        _lars(t)
    else:
        _momentum(t)
    _precision(t)
    _data(t)
    _intervals(t)
    _mode(t)


def _network(t: Translation) -> None:
    size = t["resnet_size"]
    name = f"resnet{size}" if t["model_type"] == "resnet" else f"resnext{size}_32x4d"
    if name not in MODEL_NAMES:
        raise UsageError(
            f"there is no network {name}", then="use --resnet_size 50, 101 or 152 with --model_type resnext"
        )
    t.set("model.name", name, "resnet_size", "model_type")
    for key, value in {"padding": "same", "conv_init": "tf_fan_in", "linear_init": "glorot"}.items():
        t.set(f"model.options.{key}", value)
    t.set("model.options.project_first", True)
    if t["resnet_version"] == "2":
        t.set("model.options.version", "v2", "resnet_version")
    else:
        t.explain("resnet_version", "no effect", "1 is the network with the stride in the 3x3, as here")
    t.set("data.background_class", True)
    t.set("data.preprocess.divide_by", 1)
    t.set("data.preprocess.mean", [123.68, 116.78, 103.94])
    t.set("data.preprocess.std", [1.0, 1.0, 1.0])
    t.set("augment.attempts", 100)
    t.set("augment.fallback", "whole")
    t.set("engine.channels_last", "on" if t["data_format"] == "channels_last" else "off", "data_format")
    if t["pretrained_model_checkpoint_path"]:
        t.set("model.init", t["pretrained_model_checkpoint_path"], "pretrained_model_checkpoint_path")
        t.explain("pretrained_model_checkpoint_path", "renamed", "their program parses it and does nothing")
    elif t["fine_tune"]:
        needs_weights(t, "fine_tune")


def _momentum(t: Translation) -> None:
    t.set("optimizer.weight_decay_exclude", "norm")
    cosine = t["use_cosine_lr"]
    low = t["fine_tune"] or t.num_processes > 16
    t.set("schedule.name", "cosine" if cosine else "multistep", "use_cosine_lr")
    t.set("schedule.lr", 0.256 if cosine else 0.1 if low else 0.128, "use_cosine_lr")
    t.set("schedule.base_batch_size", 256)
    if not cosine:
        t.set("schedule.milestones", ["30ep", "60ep", "80ep", "90ep"], "use_cosine_lr")
        t.set("schedule.gamma", 0.1, "use_cosine_lr")
    warms = 0.0 if t["fine_tune"] else t["warmup_epochs"]
    t.set("schedule.warmup", epochs(warms), "warmup_epochs")
    if warms:
        t.set("schedule.warmup_from", "zero")
        if cosine:
            t.set("schedule.warmup_mode", "replace")
    text = "their program accepts it and warms up all the same; --set schedule.warmup=0ep does not"
    t.explain("disable_warmup", "no effect", text)
    for key in ("epochs_for_lars", "start_learning_rate"):
        t.explain(key, "no effect", "the optimizer is not LARS")


def _lars(t: Translation) -> None:
    t.set("optimizer.name", "lars", "enable_lars")
    t.set("optimizer.weight_decay_exclude", "none", "enable_lars")
    t.set("optimizer.trust_coefficient", 0.001, "enable_lars")
    t.set("optimizer.lars_exclude", "norm-bias", "enable_lars")
    t.set("schedule.name", "polynomial", "enable_lars")
    t.set("schedule.power", 2.0, "enable_lars")
    t.set("schedule.lr", t["start_learning_rate"], "start_learning_rate")
    t.set("schedule.end_lr", 1e-4, "enable_lars")
    t.set("schedule.warmup", epochs(t["warmup_epochs"]), "warmup_epochs")
    t.set("schedule.warmup_from", "zero", "enable_lars")
    t.set("schedule.decay_until", epochs(t["epochs_for_lars"]), "epochs_for_lars")
    t.explain("use_cosine_lr", "no effect", "LARS has a polynomial schedule")
    t.explain("disable_warmup", "no effect", "their program accepts it and warms up all the same")


def _precision(t: Translation) -> None:
    t.set("precision.mode", t["dtype"], "dtype")
    dtypes = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
    text = f"images travel as uint8, which is exact; --set data.transfer_dtype={dtypes[t['data_loader_image_type']]}"
    t.explain("data_loader_image_type", "no effect", f"{text} copies them in this type")
    scale = t["loss_scale"]
    if t["dtype"] == "fp16":
        if scale not in (None, "dynamic") and not _is_number(scale):
            raise UsageError(f"--loss_scale is a number or dynamic, not {scale!r}")
        t.set("precision.loss_scale", scale if scale == "dynamic" else float(scale or 128), "loss_scale")
    else:
        t.explain("loss_scale", "no effect", f"{t['dtype']} needs no loss scale")


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _data(t: Translation) -> None:
    if t["use_synthetic_data"]:
        t.set("data.source", "synthetic", "use_synthetic_data")
    if t["mini_imagenet"]:
        t.set("data.subset_percent", _MINI_PERCENT, "mini_imagenet")
        t.notes.append(
            f"--mini_imagenet reads records of your own in imagenet_train_subset/: here {_MINI_PERCENT} % of all "
            "images; --set data.subset_percent=100 with --data on a folder of yours reads that one"
        )
    # The hardware loader reads the JPEG files instead of the records.
    key = "jpeg_data_dir" if t["jpeg_data_dir"] else "data_dir"
    if t[key]:
        t.data(t[key], key)
    elif not t["use_synthetic_data"]:
        missing_data(t, _DEFAULT_DATA)
    if t["jpeg_data_dir"] and t["data_dir"]:
        t.explain("data_dir", "no effect", "--jpeg_data_dir is read instead")
    if t["no_hpu"]:
        t.explain("no_hpu", "no effect", "the device is chosen by --device; auto finds what this machine has")
    if t["intra_op_parallelism_threads"] > 0:
        t.set("engine.num_threads", t["intra_op_parallelism_threads"], "intra_op_parallelism_threads")
    else:
        t.explain("intra_op_parallelism_threads", "no effect", "0 uses all cores, as here")


def _intervals(t: Translation) -> None:
    if t["disable_eval"] or t["return_before_eval"]:
        t.set("evaluate.every", "off", "disable_eval", "return_before_eval")
        t.explain("epochs_between_evals", "no effect", "evaluation is off")
    else:
        t.set("evaluate.every", epochs(t["epochs_between_evals"]), "epochs_between_evals")
    if t["max_eval_steps"]:
        t.set("evaluate.num_samples", t["max_eval_steps"] * t["batch_size"], "max_eval_steps")
    if t["disable_checkpoints"]:
        t.set("save.every", "100%", "disable_checkpoints")
        t.explain("disable_checkpoints", "derived", "theirs saves only at the end; save.every=off saves nothing")
    elif t["save_checkpoint_steps"]:
        t.set("save.every", steps(t["save_checkpoint_steps"]), "save_checkpoint_steps")
    else:
        t.explain("save_checkpoint_steps", "no effect", "checkpoints are not saved but at the end")
    if t["stop_threshold"] is not None:
        t.set("early_stopping.target", t["stop_threshold"], "stop_threshold")
    for key in ("log_steps", "save_summary_steps"):
        t.explain(key, "no effect", "log.every decides, for all loggers; --display_steps sets it")
    if t["export_dir"]:
        text = "no SavedModel; after training: reconv export RUN --to onnx"
        t.explain("export_dir", "not supported", text, changes_result=False)


def _mode(t: Translation) -> None:
    hooks = [name for name in t["hooks"].split(",") if name]
    known = {
        "LoggingTensorHook": "progress is always logged",
        "ExamplesPerSecondHook": "images/s are always logged",
        "LoggingMetricHook": "metrics are always logged",
        "StepCounterHook": "steps are always logged",
        "ProfilerHook": "",
    }
    for name in hooks:
        if name not in known:
            raise UsageError(f"imagenet_main.py has no hook {name!r}", then=f"the hooks are: {', '.join(known)}")
    if "ProfilerHook" in hooks:
        first, last = t["profile_steps"]
        t.option("--profile", f"{first},{last}", "hooks", "profile_steps")
    else:
        t.explain("hooks", "no effect", "; ".join(known[name] for name in hooks))
        t.explain("profile_steps", "no effect", "without --hooks ProfilerHook nothing is traced")
    if t["max_train_steps"]:
        t.option("--stop-after", steps(t["max_train_steps"]), "max_train_steps")
    if t["eval_only"]:
        t.action.verb, t.action.takes_recipe = "eval", False
        t.action.arguments = [t["model_dir"] or "RUN"]
        t.action.options = [option for option in t.action.options if option[0] == "--data"]
        t.option("--batch-size", str(t["batch_size"]), "batch_size")
        t.explain("eval_only", "renamed", "reconv eval")
        t.explain("model_dir", "renamed", "the argument of reconv eval")
        if not t["model_dir"]:
            t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))


HABANA_RESNEXT = Program(
    "habana-resnext",
    "Habana Model-References, TensorFlow ResNeXt: imagenet_main.py",
    "habana",
    ("imagenet_main.py",),
    FLAGS,
    translate,
    dialect="absl",
    usual=True,
)
