"""The registry of measured cases: the command of each, the hardware and data it needs, the code that it measures.

`python -m benchmarks run CASE` runs the command, reads its JSON and writes docs/results/data/CASE.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.results import Row

Hardware = Literal["cuda", "cpu"]
ENGINE = (
    "reconv/kernels",
    "reconv/models",
    "reconv/optim",
    "reconv/precision",
    "reconv/trainer/step.py",
)
LOADER = ("reconv/data", "csrc")
NETWORKS = {
    "resnet18": "ResNet-18",
    "resnet34": "ResNet-34",
    "resnet50": "ResNet-50",
    "resnet50+batch.size=512": "ResNet-50, batch 512",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "resnet50+model.name=resnext50_32x4d": "ResNeXt-50 32x4d",
    "resnext101-habana-1card-bf16-256": "ResNeXt-101 32x4d",
    "se-resnext101-nv-90ep-8gpu-tf32": "SE-ResNeXt-101 32x4d",
    "mobilenet-v2-habana-1card-bf16": "MobileNetV2",
    "googlenet-habana-1card-bf16": "GoogLeNet",
    "efficientnet-b0-nv-400ep-8gpu-tf32": "EfficientNet-B0",
    "efficientnet-b4-nv-400ep-8gpu-tf32+batch.size=64": "EfficientNet-B4, 380 px, batch 64",
    "ssd-resnet34+batch.size=128+detection.metric=voc10": "SSD-ResNet34, 300 px, batch 128",
}
THROUGHPUT = (
    "python -m benchmarks.training.throughput {networks} --train-modes {train} --infer-modes {infer} --json {{json}}"
)
RECIPES = " ".join(NETWORKS)
GRAPHED = "fuse+graph"  # the way of benchmarks.training.fuse_models that users should take


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A table of figures: `{json}` in the command is the file it writes, `{data}` what `--data` names."""

    name: str
    title: str
    command: str
    hardware: Hardware
    sources: tuple[str, ...]
    rows: Callable[[Any], Iterable[Row]] | None = None  # reads the command's JSON; None: entered by hand
    value: str = "Reconv"  # heads of the columns
    baseline: str = "baseline"
    label: tuple[str, str] = ("on", "")  # tells the case from others in one table: head and cell of a column
    data: str = ""  # what {data} has to be


def training_rows(content: Any) -> Iterator[Row]:
    """Training throughput of each network, from the JSON of `benchmarks.training.throughput`."""
    for network, measured in content["networks"].items():
        for row in measured["rows"]:
            if row["kind"] == "train":
                yield Row(
                    name=_network(network, row),
                    value=row["images_per_s"],
                    unit="images/s",
                    low=row["lowest"],
                    high=row["highest"],
                    n=row["n"],
                    baseline=row.get("baseline"),
                    baseline_name=row.get("baseline_name", ""),
                    more={"roofline": f"{100 * row['roofline_fraction']:.0f} %"} if "roofline_fraction" in row else {},
                )


def fuse_rows(content: Any) -> Iterator[Row]:
    """Images per second of each network with fused kernels, from the JSON of `benchmarks.training.fuse_models`."""
    for network, ways in content["networks"].items():
        rates = {way: found["images_per_s"] for way, found in ways.items() if "images_per_s" in found}
        if GRAPHED not in rates:
            continue
        windows = ways[GRAPHED]["windows"]
        pairs = [ways.get(way, {}) for way in ("fuse", "compile")]
        seconds = [f"{way['first_step_s']:.1f}" for way in pairs if "first_step_s" in way]
        differences = [f"{way['loss_difference']['max']:.4f}" for way in pairs if "loss_difference" in way]
        yield Row(
            name=network,
            value=rates[GRAPHED],
            unit="images/s",
            low=min(windows),
            high=max(windows),
            n=len(windows),
            baseline=rates.get("compile"),
            more={
                "without a graph": f"{rates['fuse']:,.0f}" if "fuse" in rates else "",
                "eager": f"{rates['eager']:,.0f}" if "eager" in rates else "",
                "first step, s": ", ".join(seconds),
                "largest difference from eager losses": ", ".join(differences),
            },
        )


def inference_rows(content: Any) -> Iterator[Row]:
    """Inference throughput and latency by network and batch size, from the JSON of `benchmarks.training.throughput`."""
    for network, measured in content["networks"].items():
        for row in measured["rows"]:
            if row["kind"] == "infer":
                latency = row["latency_ms"]
                yield Row(
                    name=f"{_network(network, row)}, batch {row['batch']}",
                    value=row["images_per_s"],
                    unit="images/s",
                    n=row["n"],
                    baseline=row.get("baseline"),
                    more={"p50, p99": f"{latency['p50']:.2f}, {latency['p99']:.2f} ms"},
                )


def process_rows(content: Any) -> Iterator[Row]:
    """Phases of whole processes, from the JSON of `benchmarks.training.time_to_result`."""
    phases = {name: [run["phases_s"].get(name, 0.0) for run in content] for name in content[0]["phases_s"]}
    named = {
        "whole process": [run["wall_s"] for run in content],
        "process start to first step": [run["startup_s"] for run in content],
        "process start to last evaluation": [run["last_step_s"] for run in content],
        "last evaluation to process end": [run["after_last_step_s"] for run in content],
        **{name.replace("_", " "): seconds for name, seconds in phases.items()},
    }
    for name, seconds in named.items():
        yield spread(name, [value for value in seconds if value is not None], "s")


def accuracy_rows(content: Any) -> Iterator[Row]:
    """Final metrics over seeds, from the JSON of `benchmarks.training.accuracy`."""
    for recipe in content:
        row = spread(recipe["name"], recipe["metric"], "%" if recipe["is_fraction"] else "")
        more = {"metric": recipe["metric_name"], "deviation": f"{recipe['deviation']:.2f}" if row.n != 1 else ""}
        yield Row(
            name=row.name,
            value=row.value,
            unit=row.unit,
            low=row.low,
            high=row.high,
            n=row.n,
            baseline=recipe.get("published"),
            more={**more, "whole process": f"{statistics.median(recipe['wall_s']):.1f} s"},
        )


def way_rows(content: Any) -> Iterator[Row]:
    """Ways from files to predictions beside the first one, from the JSON of `benchmarks.inference.predict`."""
    for model, ways in content.items():
        measured = {way: row["images_per_s"] for way, row in ways.items() if isinstance(row, dict)}
        (base_name, base), *others = measured.items()
        for way, rates in others:
            row = spread(f"{NETWORKS.get(model, model)}: {way}", rates, "images/s")
            if len(base) == len(rates):
                row = replace(row, baseline=statistics.median(base), baseline_name=base_name)
            yield row


def backend_rows(content: Any) -> Iterator[Row]:
    """The folded backend beside the faster of onnxruntime and OpenVINO, from `benchmarks.inference.winograd`."""
    names = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2"}
    for model, batches in content["models"].items():
        for batch, ways in batches.items():
            rates = {way: [int(batch) / seconds for seconds in measured] for way, measured in ways.items()}
            middle = {way: statistics.median(values) for way, values in rates.items()}
            row = spread(f"{names.get(model, model)}, batch {batch}", rates["winograd"], "images/s")
            others = {way: f"{middle[way]:.1f}" for way in ("direct", "onnxruntime", "openvino")}
            labels = {"direct": "without Winograd", "onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
            fastest = max(middle["onnxruntime"], middle["openvino"])
            yield replace(row, baseline=fastest, more={labels[way]: text for way, text in others.items()})


def figure_rows(content: Any) -> Iterator[Row]:
    """Figures as name, value, unit and n."""
    for name, value, unit, n in content["figures"]:
        yield Row(name=name, value=value, unit=unit, n=n)


def server_rows(content: Any) -> Iterator[Row]:
    """Servers in a closed loop beside the fastest LitServe of the precision, from `benchmarks.serve.throughput`."""
    fastest: dict[str, float] = {}
    for server in content["closed"]:
        if server["server"] == "LitServe":
            rate = statistics.median(server["per_s"])
            fastest[server["precision"]] = max(rate, fastest.get(server["precision"], 0.0))
    for server in content["closed"]:
        name = f"{server['server']}, {server['precision']}, {server['options'] or 'defaults'}"
        p99 = {"p99": f"{server['p99_ms']:.0f} ms"}
        row = spread(name, server["per_s"], "requests/s", p99)
        yield row if server["server"] == "LitServe" else replace(row, baseline=fastest.get(server["precision"]))


def search_rows(content: Any) -> Iterator[Row]:
    """Results of searches with fresh seeds, from the JSON of `benchmarks.training.tune_search`."""
    found = {search: [study for study in content if study["search"] == search] for search in ("tpe", "random")}
    default = statistics.fmean(100 * study["default"] for study in content if study["default"] is not None)
    best = {
        search: [default if study["best"] is None else 100 * study["best"] for study in studies]  # None: the default
        for search, studies in found.items()
    }
    for search, studies in found.items():
        first = studies[0]
        name = {"tpe": "reconv tune", "random": "random search"}[search]
        seconds, epochs = ([study[key] for study in studies] for key in ("wall_s", "epochs"))
        more = {
            "trials": f"{first['num_trials']}",
            "epochs": f"{min(epochs):.0f} to {max(epochs):.0f}",
            "better than the default": f"{sum(study['is_better'] for study in studies)} of {len(studies)}",
            "default": f"{default:.2f}",
            "time": f"{min(seconds):.0f} to {max(seconds):.0f} s",
        }
        row = spread(f"{first['recipe']}, {first['epochs_each']:g} epochs: {name}", best[search], "%", more)
        yield replace(row, baseline=statistics.median(best["random"]) if search == "tpe" else None)


def pause_rows(content: Any) -> Iterator[Row]:
    """Pauses of engines when a node is lost, from the JSON of `tests/external/test_engines.py`."""
    for engine in content:
        pauses = engine["pauses_s"]
        more = {"noticed by": engine["noticed_by"], "final weights": f"{engine['equal']} of {len(pauses)} equal"}
        yield spread(engine["engine"], [round(pause_s, 1) for pause_s in pauses], "s", more)


def review_rows(content: Any) -> Iterator[Row]:
    """Flips that are found and accuracies, from the JSON of `benchmarks.data.review`."""
    runs = content["runs"]
    names = {"cpu_s": "CPU seconds"}
    for name in runs[0]:
        if name == "wall_s":
            continue  # says more of the machine's other programs
        is_time = name in names
        values = [run[name] * (1 if is_time else 100) for run in runs]
        yield spread(names.get(name, name), values, "s" if is_time else "%")
    accuracies = [f"accuracy, {labels} labels" for labels in ("true", "flipped", "corrected")]
    if accuracies[0] in runs[0]:
        true, flipped, corrected = (statistics.fmean(run[name] for run in runs) for name in accuracies)
        yield Row(
            name="lost accuracy regained, of means", value=100 * (corrected - flipped) / (true - flipped), unit="%"
        )


def spread(name: str, values: list[float], unit: str, more: Mapping[str, str] | None = None) -> Row:
    """The median with the lowest and highest of n measurements."""
    return Row(
        name=name,
        value=statistics.median(values),
        unit=unit,
        low=min(values) if len(values) > 1 else None,
        high=max(values) if len(values) > 1 else None,
        n=len(values),
        more=more or {},
    )


def _network(recipe: str, row: Mapping[str, Any]) -> str:
    return NETWORKS.get(recipe, recipe)


CASES = {
    case.name: case
    for case in (
        Case(
            name="training-h200",
            title="Training steps in bf16, batch 256 unless named",
            command=THROUGHPUT.format(networks=RECIPES, train="bf16", infer='""') + " --compile-s 360",
            hardware="cuda",
            sources=ENGINE,
            rows=training_rows,
            baseline="torch.compile",
        ),
        Case(
            name="fuse-h200",
            title="timm's networks in a training loop, channels_last, bf16 autocast, 224 px, batch 256",
            command="python -m benchmarks.training.fuse_models --json {json}",
            hardware="cuda",
            sources=("reconv/kernels",),
            rows=fuse_rows,
            value="`reconv.fuse` in a CUDA graph",
            baseline="torch.compile",
        ),
        Case(
            name="inference-h200",
            title="Inference in bf16",
            command=THROUGHPUT.format(networks=RECIPES, train='""', infer="bf16")
            + " --infer-batches 1,32,256 --compile-s 360",
            hardware="cuda",
            sources=("reconv/kernels", "reconv/models", "reconv/inference/backends"),
            rows=inference_rows,
            baseline="torch.compile",
        ),
        Case(
            name="inference-cpu",
            title="Inference in fp32 on a CPU, per second of CPU time of one thread, 224 px",
            command="python -m benchmarks.inference.winograd --models resnet50 mobilenet_v2 resnet18 --batches 1 8"
            " --count 15 --json {json}",
            hardware="cpu",
            sources=("reconv/inference/backends", "csrc/winograd"),
            rows=backend_rows,
            value="`folded`",
            baseline="faster of onnxruntime, OpenVINO",
        ),
        Case(
            name="predict-h200",
            title="ResNet-50 from JPEG files to the five best classes, bf16, batch 256",
            command="python -m benchmarks.inference.predict --device cuda --images {data} --models resnet50"
            " --json {json}",
            data="a folder of photographs",
            hardware="cuda",
            sources=("reconv/inference", *LOADER),
            rows=way_rows,
            label=("on", "H200"),
        ),
        Case(
            name="predict-cpu",
            title="From JPEG files to the five best classes, fp32, batch 16",
            command="python -m benchmarks.inference.predict --images {data} --count 32 --json {json}",
            data="a folder of photographs",
            hardware="cpu",
            sources=("reconv/inference", *LOADER),
            rows=way_rows,
            baseline="Pillow, eager",
            label=("on", "2 CPU cores"),
        ),
        Case(
            name="serve-h200",
            title="ResNet-50 over HTTP in bf16, 128 clients",
            command='python -m benchmarks.serve.throughput --device cuda --only "workers 12" --only "processes 8"'
            " --json {json}",
            hardware="cuda",
            sources=("reconv/serve", "reconv/inference"),
            rows=server_rows,
            baseline="LitServe",
            label=("on", "H200"),
        ),
        Case(
            name="serve-cpu",
            title="ResNet-50 over HTTP, 8 clients",
            command="python -m benchmarks.serve.throughput --window 4 --json {json}",
            hardware="cpu",
            sources=("reconv/serve", "reconv/inference"),
            rows=server_rows,
            baseline="LitServe",
            label=("on", "2 CPU cores"),
        ),
        Case(
            name="loading-cpu",
            title="Photographs of 105 kB to training crops of 224 px, one core",
            command="reconv bench data --data {data} --compare --images 192 --windows 15 --json {json}",
            data="an image folder",
            hardware="cpu",
            sources=LOADER,
            value="rate",
            label=("of", "a Pillow pipeline, one core"),
        ),
        Case(
            name="loading-cores-cpu",
            title="From one core to two",
            command="reconv bench data --data {data} --images 1024 --windows 21 --json {json}",
            data="an image folder",
            hardware="cpu",
            sources=LOADER,
            value="rate",
            label=("of", "one worker"),
        ),
        Case(
            name="object-store-cpu",
            title="Packed photographs from a web server 100 ms away",
            command="python benchmarks/data/remote_store.py --images {data} --work DIR --mode read --samples 20000",
            data="a folder of photographs",
            hardware="cpu",
            sources=("reconv/data",),
            value="rate",
            label=("of", "the local rate"),
        ),
        Case(
            name="quickstart-time-cpu",
            title="`reconv train quickstart`, phases of the process",
            command="python -m benchmarks.training.time_to_result --runs 7 --json {json} quickstart",
            hardware="cpu",
            sources=("reconv/cli", "reconv/trainer", "reconv/recipes/reconv/quickstart.yaml"),
            rows=process_rows,
            value="seconds",
        ),
        Case(
            name="photos-time-h200",
            title="ResNet-50, 40 epochs of 9,469 photographs at 128 px",
            command="python -m benchmarks.training.time_to_result --runs 3 --json {json} resnet50 --data {data}"
            " --epochs 40 --batch-size 256 --set data.preprocess.size=128 --set data.preprocess.resize=128"
            " --set expect=null",
            data="what `python -m benchmarks.data.photo_folder` writes",
            hardware="cuda",
            sources=("reconv/cli", "reconv/trainer", "reconv/data"),
            rows=process_rows,
            value="seconds",
        ),
        Case(
            name="cifar10-time-h200",
            title="`cifar10-fast`, phases of the process",
            command="python -m benchmarks.training.time_to_result --runs 6 --json {json} cifar10-fast --data {data}",
            data="CIFAR-10's binary files",
            hardware="cuda",
            sources=("reconv/cli", "reconv/trainer", "reconv/data"),
            rows=process_rows,
            value="seconds",
        ),
        Case(
            name="accuracy-cpu",
            title="Accuracy on two CPU cores",
            command="python -m benchmarks.training.accuracy quickstart quickstart-detection --seeds 5 --json {json}",
            hardware="cpu",
            sources=("reconv/recipes/reconv", "reconv/models", "reconv/optim"),
            rows=accuracy_rows,
            value="metric",
            label=("on", "2 CPU cores"),
        ),
        Case(
            name="search-cpu",
            title="Successive halving beside random search on two CPU cores",
            command="python -m benchmarks.training.tune_search quickstart --seeds 3 --json {json}",
            hardware="cpu",
            sources=("reconv/tuner", "benchmarks/training/tune_search.py"),
            rows=search_rows,
            value="top-1",
            baseline="random",
            label=("on", "2 CPU cores"),
        ),
        Case(
            name="accuracy-h200",
            title="Accuracy on one H200",
            command="python -m benchmarks.training.accuracy cifar10-fast --data {data} --seeds 6 --json {json}",
            data="CIFAR-10's binary files",
            hardware="cuda",
            sources=("reconv/recipes/reconv", "reconv/models", "reconv/optim"),
            rows=accuracy_rows,
            value="metric",
            baseline="published",
            label=("on", "H200"),
        ),
        Case(
            name="verify-cost-cpu",
            title="CPU time that engine.verify=sample takes, one thread",
            command="python -m benchmarks.training.verify_cost resnet50"
            " --batch 32 --set model.name=resnet18 --set precision.mode=fp32 --set data.source=synthetic"
            " --set data.num_workers=0 --set data.num_samples=64 --set data.num_classes=1000 --json {json}",
            hardware="cpu",
            sources=("reconv/core/bits.py", "reconv/trainer/verifier.py"),
            rows=figure_rows,
            value="value",
            label=("of", "ResNet-18"),
        ),
        Case(
            name="wrong-bits-cpu",
            title="Bits flipped in short trainings, found by engine.verify",
            command="python -m benchmarks.training.wrong_bits --json {json}",
            hardware="cpu",
            sources=("reconv/core/bits.py", "reconv/trainer/verifier.py"),
            rows=figure_rows,
            value="value",
            label=("of", "faults"),
        ),
        Case(
            name="engine-pauses-cpu",
            title="From the loss of a node to the first logged step of the next attempt",
            command="PYTHONPATH=tests/support python tests/external/test_engines.py --repeats 3 --json {json}",
            hardware="cpu",
            sources=("reconv/cluster", "reconv/distributed"),
            rows=pause_rows,
            value="pause",
        ),
        Case(
            name="data-review-cpu",
            title="10 % flipped labels, found by networks trained in five folds",
            command="python -m benchmarks.data.review digits --recipe quickstart --set length=10ep --train"
            " --json {json}",
            hardware="cpu",
            sources=("reconv/review",),
            rows=review_rows,
            value="value",
            label=("of", "digits"),
        ),
        Case(
            name="data-review-features-cpu",
            title="10 % flipped labels of CIFAR-10's test images, found by the features of a trained ResNet-20",
            command="python -m benchmarks.data.review {data} --split val --init resnet20-12fca82f.th"
            " --set model.name=resnet20_cifar --set data.preprocess.resize=null"
            " --set data.preprocess.mean=[0.485,0.456,0.406] --set data.preprocess.std=[0.229,0.224,0.225]"
            " --json {json}",
            data="CIFAR-10's binary files",
            hardware="cpu",
            sources=("reconv/review",),
            rows=review_rows,
            value="value",
            label=("of", "CIFAR-10"),
        ),
        Case(
            name="data-review-h200",
            title="10 % flipped labels of CIFAR-10, found by five folds of cifar10-fast",
            command="python -m benchmarks.data.review {data} --recipe cifar10-fast --train --json {json}",
            data="CIFAR-10's binary files",
            hardware="cuda",
            sources=("reconv/review",),
            rows=review_rows,
            value="value",
            label=("of", "CIFAR-10, five folds of cifar10-fast"),
        ),
        Case(
            name="int8-cpu",
            title="Exported models in int8",
            command="reconv export RUN --to onnx --int8",
            hardware="cpu",
            sources=("reconv/inference",),
            value="int8",
            baseline="fp32",
        ),
        Case(
            name="detection-scores-cpu",
            title="COCO and VOC metrics of 5,000 images and 300,000 detections",
            command="python -m benchmarks.detection.metrics",
            hardware="cpu",
            sources=("reconv/metrics",),
            value="seconds",
        ),
    )
}

# The table of README and of the site's home: case, row, label.
HEADLINES = (
    ("training-h200", "ResNet-50", "ResNet-50, training"),
    ("training-h200", "ResNet-152", "ResNet-152, training"),
    ("training-h200", "ResNeXt-101 32x4d", "ResNeXt-101 32x4d, training"),
    ("training-h200", "MobileNetV2", "MobileNetV2, training"),
    ("training-h200", "EfficientNet-B0", "EfficientNet-B0, training"),
    ("training-h200", "GoogLeNet", "GoogLeNet, training"),
    ("training-h200", "SSD-ResNet34, 300 px, batch 128", "SSD-ResNet34 at 300 px, training"),
    ("inference-h200", "ResNet-50, batch 256", "ResNet-50, inference"),
    ("predict-h200", "Predictor", "ResNet-50, from JPEG files to the top 5"),
    ("serve-h200", "reconv serve, 8 processes", "ResNet-50 over HTTP, requests/s"),
)
