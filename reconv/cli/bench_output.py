"""The results of `reconv bench` as text."""

from __future__ import annotations

from typing import Any

from reconv.cli.options import percent, print_line, print_table


def train_lines(result: dict[str, Any], compare: bool) -> list[str]:
    """The result of `bench train` as text."""
    from reconv.logging import formatting as fmt

    step_ms = result["step_ms"]
    split = ", ".join(
        f"{name} {'unknown' if step_ms[name] is None else f'{step_ms[name]:.2f} ms'}"
        for name in ("forward", "backward", "optimizer", "input")
    )
    startup_s = result["startup_s"]
    lines = [
        f"{result['images_per_s']:,.1f} images/s at batch {result['batch']}, {result['image_size']} px, "
        f"{result['precision']}, input: {result['input']}",
        f"step {step_ms['median']:.2f} ms (median of {result['windows']} windows of {result['steps_per_window']} "
        f"steps), p95 {step_ms['p95']:.2f} ms",
        split,
        f"peak memory {fmt.size(result['peak_memory_bytes'])}; first step "
        + ("at an unknown time" if startup_s is None else f"{startup_s:.1f} s after the process started"),
        *roofline_lines(result),
    ]
    if result["scaling"] is not None:
        lines[1:1] = _scaling_lines(result)
    if compare and not result["baselines"]:
        lines.append("no baseline was measured")
    for name, baseline in result["baselines"].items():
        lines.append(
            f"{name} ({baseline['precision']}): {baseline['images_per_s']:,.1f} images/s; "
            f"ours is {baseline['ratio']:.2f} x as fast"
        )
    return [*lines, *result["notes"]]


def _scaling_lines(result: dict[str, Any]) -> list[str]:
    """Weak scaling, and the cost of the gradient reduction."""
    from reconv.core.text import count

    scaling, devices = result["scaling"], result["devices"]
    reduction = scaling["reduce"] if scaling["compress"] == "off" else f"{scaling['reduce']}, {scaling['compress']}"
    buckets = count(scaling["buckets"], "bucket")
    return [
        f"{devices} devices x {result['images_per_s_per_device']:,.1f} images/s; one device alone with the same batch "
        f"({result['batch_per_device']}): {scaling['alone_images_per_s']:,.1f}; weak scaling "
        f"{scaling['weak_scaling']:.3f}",
        f"{scaling['gradient_bytes'] / 1e6:,.3g} MB of gradients per step in {buckets} ({reduction}): "
        f"{scaling['reduce_ms']:.2f} ms alone, {percent(scaling['reduce_share'])} of a step; not overlapped "
        f"{scaling['exposed_ms']:.2f} ms, {percent(scaling['exposed_share'])} (a step without reduction takes "
        f"{scaling['apart_step_ms']:.2f} ms)",
    ]


def data_lines(result: dict[str, Any]) -> list[str]:
    """The result of `bench data` as text."""
    one, all_cores = result["one_core"], result["all_cores"]
    return [
        f"{one['images_per_s']:,.1f} images/s on one core ({one['lowest']:,.1f} to {one['highest']:,.1f} in "
        f"{one['windows']} windows of {result['images_per_window']} images; {result['jpeg_decoder']})",
        f"{all_cores['images_per_s']:,.1f} images/s with {result['workers']} workers ({all_cores['lowest']:,.1f} to "
        f"{all_cores['highest']:,.1f}): {result['scaling']:.2f} x one core ({result['scaling_cpu']:.2f} x by CPU "
        "time)",
        "time per image on one core: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["stage_ms"].items()),
    ]


def print_inference(result: dict[str, Any]) -> None:
    """A table of our network and the baselines at each batch size."""
    print_line(_inference_setup(result))

    def row(name: str, row: dict[str, Any]) -> list[str]:
        latencies = [f"{row['latency_ms'][percentile]:.2f}" for percentile in ("p50", "p90", "p95", "p99")]
        ratio = f"{row['ratio']:.2f} x" if "ratio" in row else ""
        rates = row.get("window_images_per_s")
        spread = "" if rates is None else f" ({min(rates):,.1f} to {max(rates):,.1f}, n={len(rates)})"
        rate = f"{row['images_per_s']:,.1f}{spread}"
        return [str(row["batch"]), name, rate, *latencies, str(row["iterations"]), ratio]

    rows = [row("ours", own) for own in result["batches"]]
    rows += [row(name, measured) for name, found in result["baselines"].items() for measured in found]
    rows.sort(key=lambda cells: int(cells[0]))
    columns = ["batch", "network", "images/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "iterations", "our speedup"]
    if not any(result["baselines"].values()):
        rows = [[cells[0], *cells[2:-1]] for cells in rows]
        columns = [columns[0], *columns[2:-1]]
    print_table(columns, rows)
    if result["concurrent"]:
        print_line()
        head = ["clients", "batch", "images/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "requests"]
        print_table(
            head, [[str(r["concurrency"]), *row("", r)[::2][:1], *row("", r)[2:-1]] for r in result["concurrent"]]
        )


def loadgen_lines(result: dict[str, Any]) -> list[str]:
    """LoadGen's verdict, rate, latencies and accuracy as text."""
    latencies = result["latency_ms"]
    shown = ", ".join(f"{name} {latencies[name]:.2f} ms" for name in ("p50", "p90", "p99") if name in latencies)
    rate = "" if result["images_per_s"] is None else f"{result['images_per_s']:,.1f} images/s, "
    lines = [f"{result['scenario']}: {'VALID' if result['valid'] else 'INVALID'} by LoadGen; {rate}{shown}"]
    lines += [f"LoadGen: {text}" for text in result["recommendations"]]
    if result["accuracy"] is not None:
        lines.append(f"accuracy {result['accuracy']:.2%} of {result['num_images']:,} images, by LoadGen's accuracy log")
    return [
        *lines,
        f"backend {result['backend']}, {result['inference_precision']}; summary and logs: {result['folder']}",
    ]


def print_published(result: dict[str, Any]) -> None:
    """A table of the result beside published figures of the same network."""
    from reconv.bench.published import figures_of
    from reconv.recipe.published import comparison

    ours, theirs = figures_of(result)
    if theirs:
        print_line()
        print_table(*comparison(ours, theirs))


def _inference_setup(result: dict[str, Any]) -> str:
    """One line on the setup that was measured."""
    if result["input"] == "real":
        return (
            f"{result['num_images']:,} images of {result['data']} to {result['image_size']} px, decoded by "
            f"{result['decoder']}; backend {result['backend']}, {result['inference_precision']}"
        )
    mode = ", torch.compile" if result["compiled"] else ", CUDA graph" if result["cuda_graph"] else ""
    return f"{result['image_size']} px, {result['precision']}, {result['norms_folded']} norms folded{mode}"


def print_data_paths(result: dict[str, Any]) -> None:
    """A table of the baseline and our data paths on one core."""
    from reconv.bench.data_paths import DESCRIPTIONS

    columns = ["one core", "images/s", "speedup", "range", "by CPU time", "mean pixel difference"]
    rows = [["baseline", f"{result['baseline']['images_per_s']:,.1f}", "1.00 x", "", "1.00 x", ""]]
    for name, path in result["paths"].items():
        ratios = path["ratio_windows"]
        rows.append(
            [
                DESCRIPTIONS[name],
                f"{path['images_per_s']:,.1f}",
                f"{path['ratio']:.2f} x",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{path['ratio_cpu']:.2f} x",
                f"{path['mean_difference']:.3f}",
            ]
        )
    print_table(columns, rows)


def roofline_lines(result: dict[str, Any]) -> list[str]:
    """FLOPs per image, and the utilization of the device."""
    flops = f"{result['flops_per_image'] / 1e9:,.3g} GFLOPs per image ({result['flops_rule']})"
    if result["roofline_fraction"] is None:
        return [f"{flops}; roofline unknown: {result['roofline_note']}"]
    peak, roofline = result["flop_utilization"], result["roofline_fraction"]
    return [f"{flops}; {100 * peak:.1f} % of peak FLOPs, {100 * roofline:.1f} % of the roofline"]
