"""The flags of Graphcore's TensorFlow CNNs, train.py: SDK 2.3 (MLPerf v1.1) and the names of later versions."""

from __future__ import annotations

from reconv.migrate.flags import any_text_is_true, flag, switch

_TILES = "tunes the tiles of an IPU"
_MEMORY = "tunes the memory of an IPU; a smaller batch.micro saves memory here"
_PIPELINE = "splits the network over IPUs, which computes the same; --set parallel.pipeline_stages=N does on N devices"
_HOST = "images always travel as 8 bits and are normalized on the device"
_SYNC = "weights are equal on all devices after every step"
_FILES = "every run has a folder of its own with its logs"

_OPTIMISERS = ("SGD", "RMSprop", "momentum", "LARS")


def optimiser_name(text: str) -> str:
    """The name as their program has it; their documentation writes RMSProp, too."""
    return next((name for name in _OPTIMISERS if name.lower() == text.lower()), text)


MAIN = (
    flag("--model", str.lower, "resnet", choices=("resnet", "resnext", "efficientnet")),
    flag(
        "--lr-schedule",
        str,
        "stepped",
        choices=("stepped", "cosine", "exponential", "polynomial_decay_lr", "polynomial_decay"),
    ),
    flag("--restore-path", str),
    flag("--config", str),
    flag("--config-path", str),
)
MODEL = (
    flag("--model-size", str.upper),
    switch("--batch-norm"),
    switch("--group-norm"),
    flag("--groups", int),
    flag("--BN-decay", float, 0.97),
    flag("--convolution-groups", int),
    flag("--group-dim", int),
    switch("--widenet"),
    flag("--dropout-rate", float),
    flag("--block-survival-prob", float, 0.8),
    switch("--no-se"),
    flag("--depth-divisor", int, 8),
    flag("--top-width", int, 1280),
    switch("--use-relu"),
    flag("--expand-ratio", int, 6),
    flag("--norm-epsilon", float, 1e-3),
    switch("--proxy-norm"),
    flag("--proxy-epsilon", float, 0.03),
    switch("--no-proxy-recompute", none=_MEMORY),
    flag("--width-coefficient", float),
    flag("--depth-coefficient", float),
)
DATASET = (
    flag("--dataset", str, choices=("imagenet", "cifar-10", "cifar-100")),
    flag("--data-dir", str),
    flag("--pipeline-num-parallel", int, 48, sets="data.num_workers"),
    switch("--generated-data"),
    switch("--synthetic-data"),
    switch("--no-dataset-cache", none="data is not cached unless data.cache is ram"),
    switch("--normalise-input"),
    flag("--image-size", int, positive=True),
    switch("--train-with-valid-preprocessing", sets="augment.train_like_eval"),
    switch("--hostside-norm --no-hostside-norm", none=_HOST),
    switch("--standard-imagenet", none="there is one way to read data, and it is deterministic"),
    flag("--mixup-alpha", float, 0.0),
    flag("--cutmix-lambda", float, 1.0),
    flag("--cutmix-version", int, 1, choices=(1, 2)),
    switch("--hostside-image-mixing", none="images are mixed on the device, with the same result"),
    switch("--eight-bit-io", none=_HOST),
    flag("--dataset-percentage-to-use", float, 100.0, sets="data.subset_percent"),
    switch("--fused-preprocessing", none=_HOST),
)
TRAINING = (
    flag("--batch-size --micro-batch-size", int, positive=True),
    switch("--rts"),
    flag("--gradient-accumulation-count", int, 1, positive=True),
    flag("--base-learning-rate-exponent", float),
    flag("--abs-learning-rate", float),
    flag("--epochs", float),
    flag("--iterations", int),
    flag("--weight-decay", float),
    flag("--loss-scaling", float, 128.0),
    flag("--label-smoothing", float, 0.0),
    flag("--ckpts-per-epoch", int, 1),
    flag("--epochs-per-ckpt", int, 0),
    flag("--ckpt-epochs-offset", int, 0),
    flag("--ckpt-all-instances", any_text_is_true, False, none="one checkpoint serves all devices"),
    switch("--no-validation"),
    flag("--shards", int, 1, none=_PIPELINE),
    flag("--replicas", int, 1, positive=True),
    flag("--max-cross-replica-buffer-size", int, 10 * 1024 * 1024),
    switch("--pipeline"),
    flag("--pipeline-splits", str, arity="+", none=_PIPELINE),
    flag("--pipeline-schedule", str, "Interleaved", choices=("Interleaved", "Grouped", "Sequential"), none=_PIPELINE),
    flag("--optimiser --optimizer", optimiser_name, "SGD", choices=_OPTIMISERS),
    flag("--momentum", float, 0.9),
    flag("--rmsprop-decay", float),
    flag("--rmsprop-base-decay-exp", float),
    flag("--rmsprop-epsilon", float, 1e-3),
    switch("--offload-fp32-weight-copy", none="no second copy of the weights is kept on the device"),
    flag("--variable-filter", str, arity="+"),
    flag("--init-path", str, sets="model.init"),
    switch("--distributed", none="is set by the launcher"),
    flag("--syncs-per-epoch", int, 0, none=_SYNC),
    flag("--epochs-per-sync", float, 0.0, none=_SYNC),
    switch("--stable-norm", none="statistics of norms are always float32"),
    flag("--weight-avg-N", int, arity="+"),
    flag("--weight-avg-exp", float, arity="+"),
    flag("--lars-epsilon", float, 0.0),
    flag("--lars-skip-list", str, ["beta", "gamma", "bias"], arity="+"),
    flag("--lars-weight-decay", float),
    flag("--lars-eeta", float, 0.001),
    flag("--min-remote-tensor-size", int, 128, none="all state of the optimizer is offloaded or none"),
)
SCHEDULE = (
    flag("--learning-rate-decay", float, arity="+"),
    flag("--learning-rate-schedule", str, arity="+"),
    flag("--warmup-epochs", float, 5.0),
    flag("--lr-decay-rate", float),
    flag("--lr-drops", int),
    flag("--poly-lr-decay-power", float, 2.0),
    flag("--poly-lr-initial-lr", float, missing="is set by --abs-learning-rate"),
    flag("--poly-lr-end-ratio", float, 1e-5),
    flag("--abs-end-learning-rate", float),
)
IPU = (
    flag("--precision", str, "16.16", choices=("16.16", "16.32", "32.32")),
    switch("--enable-half-partials"),
    switch("--gather-conv-output", none=_TILES),
    switch("--no-stochastic-rounding"),
    flag("--stochastic-rounding", str.upper, choices=("ON", "OFF", "ON_PRNG_STABLE", "RI_PRNG_STABLE")),
    flag(
        "--batches-per-step --device-iterations",
        int,
        1000,
        none="is how many steps an IPU runs before the host looks; on CUDA a step is one replay of a CUDA graph",
    ),
    flag("--select-ipu --select-ipus", str, ["AUTO"], arity="+", none="names an IPU; --device cuda:1 names a device"),
    switch("--fp-exceptions"),
    switch("--enable-recomputation --enable-recompute"),
    flag("--seed", int, sets="seed"),
    switch("--identical-replica-seeding", none="random numbers depend on the sample, not on the device"),
    switch("--dataset-benchmark"),
    flag("--available-memory-proportion", str, arity="+", none=_MEMORY),
    switch("--disable-variable-offloading", none="state of the optimizer stays on the device, unless you offload it"),
    switch("--enable-conv-dithering", none=_TILES),
    flag(
        "--internal-exchange-optimisation-target",
        str,
        choices=("balanced", "cycles", "memory"),
        none=_TILES,
    ),
    switch("--compile-only"),
    switch("--on-demand", none="chooses when an IPU is attached"),
    flag("--prefetch-depth", int, sets="data.prefetch"),
    flag("--num-io-tiles", int, 0, none=_TILES),
    flag("--BN-span", int, 1, positive=True),
    flag("--max-reduce-many-buffer-size", int, 0, none=_TILES),
    switch("--saturate-on-overflow"),
    switch("--latency", none="reconv bench infer measures latency"),
    flag("--scheduling-algorithm", str, "choose-best", none="tunes the IPU's compiler"),
    flag("--valid-batch-size", int, sets="evaluate.batch_size"),
    flag("--sharding-exclude-filter --sharding-include-filter", str, arity="+", none=_PIPELINE),
)
LOGGING = (
    flag("--log-dir", str, "logs/"),
    flag("--logs-path", str),
    flag("--name-suffix", str, none=_FILES),
    flag("--logs-per-epoch", int, 16, positive=True),
    flag("--log-freq", int, 500),
    switch("--no-logs", run="--quiet"),
    switch("--log-all-instances", none="every process writes a log of its own"),
    switch("--mlperf-logging"),
    switch("--wandb"),
    flag("--wandb-project", str, "tf-cnn", none="set WANDB_PROJECT"),
)
FLAGS = (*MAIN, *MODEL, *DATASET, *TRAINING, *SCHEDULE, *IPU, *LOGGING)
