"""Translation of the environment variables of a command."""

from __future__ import annotations

import re

from reconv.migrate.translation import Row

_READ = "is read here, too"
KNOWN: tuple[tuple[str, str], ...] = (
    (r"MASTER_ADDR|MASTER_PORT", "is read here, too, where a launcher starts the processes"),
    (r"WORLD_SIZE|RANK|LOCAL_RANK|NODE_RANK", "is read here, too, where a launcher starts the processes"),
    (r"CUDA_VISIBLE_DEVICES|HABANA_VISIBLE_DEVICES|HABANA_VISIBLE_MODULES", "chooses devices, here, too"),
    (r"OMP_NUM_THREADS|MKL_NUM_THREADS", "engine.num_threads says how many threads torch uses"),
    (r"DATA_DIR", "is read here, too, if --data is not given"),
    (r"NCCL_\w+|GLOO_\w+|UCX_\w+", "is read by the library, here, too"),
    (r"HCCL_\w+|HCL_\w+|SOCKET_NTHREADS|HLS_\w+", "is read by Gaudi's library, with --device hpu"),
    (r"FORCE_HABANA_IMAGENET_LOADER_FALLBACK", "chooses Gaudi's loader; data.backend decides here, for equal images"),
    (r"PT_HPU_\w+|PT_ENABLE_\w+|LOG_LEVEL_\w+|HABANA_\w+|GC_KERNEL_PATH|MAX_WAIT_ATTEMPTS", "is for Gaudi's software"),
    (r"POPLAR_\w+|TF_POPLAR_FLAGS|IPUOF_\w+|POPART_\w+|POPTORCH_\w+", "is for Graphcore's software"),
    (r"TF_\w+|XLA_FLAGS|HOROVOD_\w+", "is for TensorFlow"),
    (
        r"LD_PRELOAD",
        "preloads a library, as jemalloc; set it before the new command if you want it: the result is equal",
    ),
    (r"LD_LIBRARY_PATH|PATH|PYTHONPATH|MPI_ROOT|PYTHON|VIRTUAL_ENV", "is about their installation"),
    (r"WANDB_\w+|MLFLOW_\w+", "is read by the logger, here, too"),
    (
        r"PYTHONUNBUFFERED|PYTHONHASHSEED|KMP_\w+|MALLOC_\w+|TCMALLOC_\w+",
        "is about the process, and changes nothing here",
    ),
    (r"TORCH_\w+|PYTORCH_\w+|CUDNN_\w+|CUBLAS_\w+|CUDA_\w+", "is read by torch, here, too"),
    (r"SLURM_\w+|OMPI_\w+|PMI\w*", "is read here, too, where a launcher starts the processes"),
)


def variable_row(name: str, value: str, is_used: bool) -> Row:
    """The row of one assignment; `is_used`: the command itself refers to it."""
    typed = f"{name}={value}"
    for pattern, text in KNOWN:
        if re.fullmatch(pattern, name):
            return Row("environment", typed, "same" if _READ[:7] in text else "no effect", text)
    text = "is used in the command, and replaced by its value" if is_used else "is not known here, and not read"
    return Row("environment", typed, "derived" if is_used else "no effect", text)
